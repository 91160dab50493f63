"""Compatibility of runs with checkpoints."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effasr import config as configuration
from effasr.optim.schedules import learning_rate_ratio, peak_learning_rate
from effasr.training.config import TrainConfig

log = logging.getLogger(__name__)

_DECISIVE = ("seed", "model", "data", "lora")
"""Sections of a configuration that determine the weights and the order of the data."""

_DECISIVE_BESIDE = frozenset(
    {"optimizer.exempt", "optimizer.name", "training.freeze", "training.freeze_steps"}
)
"""Fields of other sections that do too: the optimizer groups and numbers parameters by them."""

_HARMLESS = frozenset(
    {
        "data.validation",
        "data.tokenizer",
        "data.train",
        "data.filters.max_dropped",
        "data.cache",
        "data.workers",
        "data.prefetch",
        "data.on_bad_audio",
        "data.audio_augmentation.noise.manifests",
        "data.audio_augmentation.reverberation.manifests",
    }
)
"""Fields of decisive sections that may change. Manifests and tokenizer are compared by content,
with the fingerprint of `effasr.data.index.corpus.Corpus`, and not by path."""


@dataclass(frozen=True, slots=True)
class Saved:
    path: Path
    state: dict[str, Any]


def identity(config: TrainConfig, corpus: str, plan: str | None, ranks: int) -> dict[str, Any]:
    """Return the values that the functions below compare; ``plan``, ``corpus``: fingerprints."""
    mapping = configuration.to_mapping(config)
    return {"config": mapping, "corpus": corpus, "plan": plan, "ranks": ranks}


def check_resumable(saved: Saved, config: TrainConfig, ranks: int) -> None:
    before = configuration.complete(TrainConfig, saved.state["config"])
    check_same_run(before, configuration.to_mapping(config))
    check_same_ranks(saved.state, config.data.strategy, ranks)


def show_changes(saved: Saved, config: TrainConfig) -> None:
    """Log tolerated differences, and what they make of the learning rate."""
    before = configuration.complete(TrainConfig, saved.state["config"])
    for change in check_same_run(before, configuration.to_mapping(config)):
        log.warning("differs from the checkpoint: %s", change)
    step = saved.state["step"]
    rates = [
        _rate(each, step) for each in (configuration.from_mapping(TrainConfig, before), config)
    ]
    if not math.isclose(*rates, rel_tol=1e-6):
        log.warning(
            "after step %d the learning rate is %.3g, and was to be %.3g", step, *rates[::-1]
        )


def _rate(config: TrainConfig, step: int) -> float:
    peak = peak_learning_rate(config.optimizer, config.data.micro_batches)
    return peak * learning_rate_ratio(config.schedule, step, config.training.known_steps)


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare the configuration in a checkpoint with that of this run."""
    tolerated = []
    for path, old, new in _differences(saved, now):
        change = f"{path}: {old!r} -> {new!r}"
        if _decides(path):
            raise ValueError(must_stay(path, old, new, now))
        tolerated.append(change)
    return tolerated


def must_stay(path: str, old: Any, new: Any, run: Mapping[str, Any]) -> str:
    return (
        f"`{path}` must stay {old!r}, as in the checkpoint of this run, but is {new!r}: set it "
        f"back, {begin_anew(run)}."
    )


def begin_anew(run: Mapping[str, Any]) -> str:
    """Return what can be done where a run, by its configuration, cannot be resumed."""
    name, folder = run.get("name", "run"), run.get("output", "runs")
    return (
        f"or keep what it has learnt in another run (init_from={folder}/{name} "
        f"name={name}2), or start again with training.restart=true"
    )


def check_same_ranks(saved: Mapping[str, Any], strategy: str, ranks: int) -> None:
    """Raise a ValueError if the order of the data depends on the number of ranks, which differs."""
    before = saved.get("ranks", ranks)
    if strategy != "packed" and before != ranks:
        raise ValueError(
            f"`data.strategy` = {strategy} needs {before} ranks, as in the checkpoint, but has "
            f"{ranks}: lhotse's samplers distribute batches over a fixed number of ranks, and with "
            "another number utterances would be lost or repeated. Start as many, or begin with "
            "training.restart=true; only strategy packed continues on any number."
        )


def check_same_plan(saved: Mapping[str, Any], fingerprint: Callable[[int], str]) -> None:
    """Raise a ValueError if the plan of the epoch in progress has changed."""
    epoch, step = saved["position"]
    before = saved.get("plan")
    if before is not None and fingerprint(epoch) != before:
        raise ValueError(
            f"the plan of epoch {epoch} must stay as in the checkpoint, of which {step} steps "
            "have been made, but it has changed, and utterances would be lost or repeated: "
            "restore the file of `data.bucket_batch_sizes`, the recordings of "
            "`data.audio_augmentation`, or the versions of effasr and lhotse that the run began "
            "with, or start again with training.restart=true."
        )


def _decides(path: str) -> bool:
    part = path.split(".")[0]
    if path in _HARMLESS or (path.startswith("data.mix.") and path.endswith(".manifests")):
        return False
    return path in _DECISIVE_BESIDE or part in _DECISIVE


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        old, new, path = saved.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}.")
        elif old != new:
            yield path, old, new
