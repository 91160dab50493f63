"""Validation during training: the code of ``effasr evaluate``, split over the ranks."""

import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

from lhotse.cut import Cut

from effasr import config as configuration
from effasr.checks import check
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.pairs import TextPair, is_text_only, pairs
from effasr.data.manifest.reader import iterate
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import evaluate, evaluate_pairs, shard
from effasr.evaluation.metric import BY_NAME
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, free_set_name, merge
from effasr.evaluation.translation import check_package
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.training.config import TrainConfig
from effasr.training.diagnostics.probe import Probe, ProbeSums
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.second_pass.text_to_text import TextToText
from effasr.untrusted.remote import localized

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SetResult:
    """Results of a validation set, over all ranks; the probe has zero sums without diagnostics."""

    evaluation: Evaluation
    probe: ProbeSums


class Validator:
    """Transcribes the validation sets with the current weights of a model.

    Of text pairs, the text encoder reads the sources.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ASRModel,
        tokenizer: Tokenizer,
        context: DistributedContext,
        prompt: Prompt,
    ) -> None:
        # All ranks must detect speech alike, whatever is installed where.
        decoding = config.evaluation.decoding
        vad = "loudness" if decoding.vad == "auto" else decoding.vad
        self._config = replace(config.evaluation, decoding=replace(decoding, vad=vad))
        self._model = model
        self._tokenizer = tokenizer
        self._context = context
        self.progress: Callable[[str, int, int], None] = lambda *counts: None
        # Unknown settings are errors before training starts.
        get_normalizer(self._config.normalizer)
        recognizer = Recognizer(model, tokenizer, self._config.decoding)
        digest = hashlib.sha256(repr(configuration.to_mapping(self._config)).encode())
        self._sets: dict[str, list[Cut] | list[TextPair]] = {}
        self._probes: dict[str, Probe] = {}
        tasks: dict[str, set[str]] = {}
        diagnostics = config.training.diagnostics
        for path in config.data.validation:
            name = free_set_name(path, self._sets)
            path = str(localized(path))
            if is_text_only(path):
                TextToText(model, tokenizer, self._config.decoding)
                members = even_sample(pairs(path), self._config.max_utterances, config.seed)
                _check_experts(config.model, members)
                tasks[name] = {pair.prompt.task for pair in members}
                digest.update(repr([(pair.source, pair.text) for pair in members]).encode())
                self._sets[name] = members[context.rank :: context.size]
                continue
            # Lines that do not say otherwise are as most of training, as in `effasr evaluate`.
            read = iterate(path, prompt=prompt, text_column=config.data.text_column)
            cuts = even_sample(read, self._config.max_utterances, config.seed)
            if not cuts:
                raise ValueError(f"{path}: holds no utterances.")
            tasks[name] = _check_scorable(path, cuts, recognizer, config)
            digest.update(repr([(cut.id, cut.duration, _texts(cut)) for cut in cuts]).encode())
            self._sets[name] = part = shard(cuts, context.rank, context.size)
            # Language models have no per-utterance losses.
            has_losses = config.model.language_model is None
            if has_losses and diagnostics is not None and diagnostics.probe_utterances:
                self._probes[name] = Probe(
                    part,
                    model,
                    tokenizer,
                    count=diagnostics.probe_utterances,
                    # The training step has room for as many, and for their gradients.
                    frame_budget=config.data.known_frame_budget,
                    precision=self._config.decoding.precision,
                )
        check_best_sets(config, self._sets)
        if any("translate" in names for names in tasks.values()):
            check_package()
        by = self._config.best_by
        best = set().union(*(tasks[name] for name in self._config.best_sets or tasks))
        if by == "auto":
            by = "bleu" if best == {"translate"} else "wer"
        rule = "be auto, wer, cer or loss for sets without translations"
        check(by not in ("bleu", "chrf") or "translate" in best, "evaluation.best_by", rule, by)
        self.metric = BY_NAME[by]
        if by == "loss" and not self._probes:
            raise ValueError(
                "`evaluation.best_by` must not be loss for a language model, for text pairs, and "
                "without training.diagnostics.probe_utterances, which have none: leave it out."
            )
        # Of the sets and how they are scored: results are only comparable where it is the same.
        self.fingerprint = digest.hexdigest()

    def __call__(self, stop: StopRequest, window: float | None = None) -> dict[str, SetResult]:
        """Return the results of each set; all ranks call this. A stop is a StopInterrupt.

        With a ``window`` (seconds), transcripts are those of a Whisper that hears silence up to it.
        """
        results = {}
        for name, members in self._sets.items():
            work = partial(self._evaluate, name, members, window)
            evaluations, probes = zip(*stop.gather(self._context, work), strict=True)
            results[name] = SetResult(merge(evaluations), reduce(add, probes))
        return results

    def _evaluate(
        self, name: str, members: list[Cut] | list[TextPair], window: float | None
    ) -> tuple[Evaluation, ProbeSums]:
        done, model = itertools.count(1), (self._model, self._tokenizer)
        settings: Any = {"normalizer": self._config.normalizer, "config": self._config.decoding}
        if isinstance(next(iter(members), None), TextPair):
            part = evaluate_pairs(*model, members, **settings)  # type: ignore[arg-type]
        else:
            settings["on_result"] = lambda result: self.progress(name, next(done), len(members))
            with nullcontext() if window is None else self._model.window(window):
                part = evaluate(*model, members, **settings)  # type: ignore[arg-type]
        return part, self._probes[name]() if name in self._probes else ProbeSums()


def check_best_sets(config: TrainConfig, names: Collection[str]) -> None:
    unknown = [name for name in config.evaluation.best_sets if name not in names]
    if unknown:
        raise ValueError(
            f"`evaluation.best_sets` must name sets of data.validation ({', '.join(names)}), but "
            f"has {unknown[0]!r}."
        )


def even_sample(items: Iterable[T], count: int | None, seed: int) -> list[T]:
    """Return so many items at even distances, with the first chosen by the seed."""
    everything = list(items)
    if count is None or count >= len(everything):
        return everything
    first = random.Random(seed).random()
    return [everything[int((n + first) * len(everything) / count)] for n in range(count)]


def _texts(cut: Cut) -> list[str | None]:
    return [supervision.text for supervision in cut.supervisions]


def _check_scorable(
    path: str, cuts: Sequence[Cut], recognizer: Recognizer, config: TrainConfig
) -> set[str]:
    """Check that a set can be scored, with the limit of the training set; return its tasks."""
    reasons, words, tasks = [], 0, set()
    normalize = get_normalizer(config.evaluation.normalizer)
    for cut in cuts:
        texts = _texts(cut)
        if len(texts) != 1 or texts[0] is None:
            reasons.append(f"{cut.id}: no reference text: the cut needs one supervision")
            continue
        try:
            prompt = prompt_of(cut)
            recognizer.prompt(prompt)
        except ValueError as error:
            reasons.append(f"{cut.id}: {error}")
        else:
            words += len(normalize(texts[0]).split())
            tasks.add(prompt.task)
    limit = config.data.filters.max_dropped
    problem = f"{len(reasons)} of {len(cuts)} utterances cannot be scored"
    if len(reasons) > limit * len(cuts) or len(reasons) == len(cuts):
        raise ValueError(
            f"{path}: {problem}, over the {100 * limit:g} % that `data.filters.max_dropped` "
            f"allows; the first: {reasons[0]}"
        )
    if not words:
        raise ValueError(f"{path}: no reference has a word: give `text`, or data.validation=[].")
    if reasons:
        log.warning("%s: %s; the first: %s", path, problem, reasons[0])
    return tasks


def _check_experts(config: ModelConfig, members: Sequence[TextPair]) -> None:
    if (experts := config.named_experts(text=True)) is None:
        return
    for pair in members:
        try:
            experts.number_of(pair.prompt)
        except ValueError as error:
            raise ValueError(f"{pair.origin}: {error}") from error
