"""A calibration from beginning to end, for the command and for training."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from effasr import config as configuration
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.training.calibration import store
from effasr.training.calibration.search import (
    Search,
    SearchResult,
    bucket_sizes,
    frames_per_full_wave,
)
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.store import Calibration
from effasr.training.calibration.trial import Measurement, Request, measure
from effasr.training.calibration.workload import Conversations, Population, Texts, Workload
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus, text_costs
from effasr.training.memory import total_bytes

T = TypeVar("T")

log = logging.getLogger(__name__)

_UNLIMITED_FRAMES = 1_000_000
"""A frame budget that holds every utterance of a corpus with all of its tokens."""


def resolve_auto_frame_budget(
    config: TrainConfig, tokenizer: Tokenizer, context: DistributedContext
) -> TrainConfig:
    """Replace ``data.frame_budget: auto`` by the result of an earlier calibration, or of a new one.

    Rank 0 calibrates, and the others wait for it. All ranks call this.
    """
    if config.data.frame_budget != "auto":
        return config
    population = read_population(config, tokenizer)

    def find(alive: Callable[[], None]) -> tuple[Calibration, bool]:
        target = target_bytes(config.calibration, context.device, os.environ)
        described = store.describe(config, tokenizer.vocab_size, population, context.device, target)
        earlier = store.find(store.fingerprint(described))
        if earlier is not None:
            return earlier, False
        log.warning(
            "data.frame_budget is auto, and there is no calibration for this machine, model and "
            "corpus yet: trying budgets"
        )
        return (
            calibrate(
                config, tokenizer.vocab_size, population, context.device, target,
                note=lambda text: log.warning("%s", text), alive=alive,
            ),
            True,
        )  # fmt: skip

    found, is_new = on_rank_zero(find, context, config.training.timeout_s / 4)
    log.warning(
        "data.frame_budget is %d, data.token_budget %d%s",
        found.frame_budget,
        found.token_budget,
        "" if is_new else f", as calibrated before ({store.path_of(found.fingerprint)})",
    )
    return with_budgets(config, found)


def with_budgets(config: TrainConfig, found: Calibration) -> TrainConfig:
    data = replace(
        config.data,
        frame_budget=found.frame_budget,
        token_budget=found.token_budget,
        max_sequences=found.max_sequences,
    )
    return replace(config, data=data)


def calibrate(
    config: TrainConfig,
    vocab_size: int,
    population: Population,
    device: torch.device,
    target: int,
    *,
    note: Callable[[str], None] = lambda text: None,
    alive: Callable[[], None] = lambda: None,
) -> Calibration:
    """Find the budgets for a run, and save them; ``target``: bytes that training may take."""
    started = time.monotonic()
    described = store.describe(config, vocab_size, population, device, target)
    mapping = configuration.to_mapping(_without_weights(config))

    def trial(work: Workload) -> Measurement:
        # With two micro-batches, the gradients of the first occupy memory during the second, as the
        # buckets of a gradient all-reduce do.
        count = min(2, config.data.micro_batches)
        request = Request(mapping, vocab_size, str(device), target, count, work)
        return measure(request, alive=alive)

    wave = 0
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        wave = frames_per_full_wave(config.model.encoder.width, multiprocessors)
    search = Search(
        population, config.calibration, target, config.data.micro_batches, trial, note, wave
    )
    return _record(search.run(), search, described, config, time.monotonic() - started)


def _without_weights(config: TrainConfig) -> TrainConfig:
    """Trials use random weights; memory and time do not depend on them."""
    settings = config.model.language_model
    if settings is not None:
        settings = replace(settings, weights="random")
        config = replace(config, model=replace(config.model, language_model=settings))
    if config.training.freeze_steps is not None:
        # The budget is that of the steps that train everything.
        config = replace(config, training=replace(config.training, freeze=(), freeze_steps=None))
    return replace(config, init_from=None)


def _record(
    result: SearchResult, search: Search, described: dict, config: TrainConfig, seconds: float
) -> Calibration:
    shape = search.population.shape(result.frame_budget)
    table = None
    if search.population.conversations is None:
        bins = BucketTable.derive(search.population.lengths, shape, config.data.buckets)
        table = bucket_sizes(bins, search.population.shape(result.largest))
    replay = result.replay
    assert replay.predicted_bytes is not None
    assert replay.error is not None
    calibration = Calibration(
        fingerprint=store.fingerprint(described),
        made_for=described,
        frame_budget=result.frame_budget,
        token_budget=shape.token_budget,
        max_sequences=shape.max_sequences,
        limited_by=result.limited_by,
        largest_frame_budget=result.largest,
        target_bytes=search.target,
        margin=config.calibration.margin,
        predicted_bytes=replay.predicted_bytes,
        measured_bytes=replay.measured.peak_bytes,
        prediction_error=replay.error,
        audio_seconds_per_second=replay.measured.speed,
        memory_model=asdict(result.memory),
        speed_model=asdict(result.speed),
        bucket_batch_sizes=[
            [round(frames * shape.framing.seconds, 2), tokens, size]
            for (frames, tokens), size in zip(table.bins, table.batch_sizes, strict=True)
        ]
        if table is not None
        else [],
        trials=[asdict(trial) for trial in result.trials],
        seconds=seconds,
    )
    store.save(calibration, table, shape.framing)
    return calibration


def read_population(config: TrainConfig, tokenizer: Tokenizer) -> Population:
    """Return the lengths of the corpus, in budgets that drop nothing."""
    data = replace(config.data, frame_budget=_UNLIMITED_FRAMES)
    corpus = load_corpus(replace(config, data=data), tokenizer, None)
    # Imported here so that a model can be trained without the packages that read data.
    from effasr.data.conversation.corpus import ConversationCorpus

    conversations = None
    if isinstance(corpus, ConversationCorpus):
        conversations = Conversations.of(corpus, config.data.mix, config.model)
    texts = None
    if corpus.text is not None:
        texts = Texts(corpus.text, data.text_token_budget, text_costs(config, tokenizer))
    return Population.of(
        corpus.lengths,
        config.data.token_budget,
        config.data.max_sequences,
        config.model.features.framing,
        transducer=config.model.transducer is not None,
        conversations=conversations,
        texts=texts,
    )


def target_bytes(
    settings: CalibrationConfig, device: torch.device, environment: Mapping[str, str]
) -> int:
    """Return the bytes that this process may take: of a GPU, or its share of the host."""
    if settings.target_bytes is not None:
        return settings.target_bytes
    sharing = 1 if device.type == "cuda" else int(environment.get("LOCAL_WORLD_SIZE", 1))
    return int(settings.target_share * total_bytes(device) / sharing)


def on_rank_zero(
    work: Callable[[Callable[[], None]], T], context: DistributedContext, every_s: float
) -> T:
    """Call ``work`` on rank 0 alone, and return its result on all ranks, which call this.

    A collective must not wait longer than its timeout: ``work`` gets a function to call regularly,
    which broadcasts every ``every_s`` seconds that it is still running. An error on rank 0 ends it.
    """
    if context.size > 1 and not context.is_main:
        while True:
            done, value = context.broadcast((False, None))
            if done:
                return value  # type: ignore[return-value]
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if context.size > 1 and time.monotonic() - last >= every_s:
            context.broadcast((False, None))
            last = time.monotonic()

    value = work(alive)
    context.broadcast((True, value))
    return value
