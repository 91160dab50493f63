"""Evaluation of a model on a set, in training and on the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lhotse.cut import Cut

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import named
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, ScoredUtterance
from effasr.evaluation.wer import count_errors
from effasr.evaluation.word_confidence import judge
from effasr.model.asr import ASRModel
from effasr.transcription.recognizer import Recognizer, Request
from effasr.transcription.results import Failure, Result, Transcription


def openable_cuts(
    path: str | Path, *, language: str, progress: Callable[[int], None] = lambda count: None
) -> tuple[list[Cut], list[Failure]]:
    """Return the cuts of a manifest, and a failure for each line whose audio cannot be opened.

    Args:
        path: See `effasr.data.manifest.reader.read`.
        language: Default language of lines.
        progress: Called with the number of utterances read so far.

    Raises:
        ValueError: It is no manifest, has no utterance, or a line is malformed.
    """
    cuts, failures = [], []
    for count, (name, utterance) in enumerate(named(path, language=language), 1):
        try:
            cuts.append(utterance.cut(name))
        except AudioError as error:
            failures.append(Failure(name, str(error)))
        progress(count)
    if not cuts and not failures:
        raise ValueError(f"{path}: holds no utterances.")
    return cuts, failures


def evaluate(
    model: ASRModel,
    tokenizer: Tokenizer,
    cuts: Iterable[Cut],
    *,
    normalizer: str = "basic",
    config: DecodingConfig | None = None,
    failures: Sequence[Failure] = (),
    on_result: Callable[[Result], None] | None = None,
) -> Evaluation:
    """Transcribe cuts and compare with their references.

    Each cut is decoded with the prompt of its manifest. Cuts without a reference, with unreadable
    audio, in a language that the tokenizer does not know, or to be translated by CTC are counted in
    ``failures``. An empty reference is valid: all recognised words are insertions.

    Args:
        model: Decodes on its device; its training mode is restored.
        tokenizer: Tokenizer of the model.
        cuts: Cuts with one supervision each.
        normalizer: See `get_normalizer`. Only the counts depend on it.
        config: The default configuration by default.
        failures: Utterances of the set that are no cuts; see `openable_cuts`.
        on_result: Called with each result, for example to show progress.

    Raises:
        ValueError: The normaliser is unknown, or the model lacks what ``config.method`` needs.
    """
    started = time.perf_counter()
    normalize = get_normalizer(normalizer)
    recognizer = Recognizer(model, tokenizer, config)
    scorable, unscorable = scorable_requests(cuts, recognizer.sample_rate)
    failed, utterances = [*failures, *unscorable], []
    results = recognizer.results(wanted for _, wanted in scorable)
    for (reference, wanted), result in zip(scorable, results, strict=True):
        if isinstance(result, Failure):
            failed.append(result)
        else:
            scored = _scored(reference, wanted.prompt, result, normalize)
            words, spaces = result.word_confidences, wanted.prompt.target not in WITHOUT_SPACES
            if recognizer.config.word_confidence and words is not None and spaces:
                pairs = judge(normalize(reference), words, normalize)
                scored = replace(scored, judged=pairs)
            utterances.append(scored)
        if on_result is not None:
            on_result(result)
    seconds = time.perf_counter() - started
    settings = recognizer.config
    return Evaluation(
        normalizer,
        tuple(utterances),
        tuple(failed),
        seconds,
        method=recognizer.method,
        calibrated=settings.calibration is not None if settings.word_confidence else None,
    )


def _scored(
    reference: str, prompt: Prompt, result: Transcription, normalize: Callable[[str], str]
) -> ScoredUtterance:
    """Count the errors of a transcript, and of its alternatives."""
    wanted, alternatives = normalize(reference), result.alternatives
    errors = count_errors(wanted, normalize(result.text))
    # Different alternatives are often the same words.
    others = {normalize(one.text) for one in alternatives} - {normalize(result.text)}
    every = [errors, *(count_errors(wanted, text) for text in sorted(others))]
    return ScoredUtterance(
        id=result.id,
        group=_group(prompt),
        reference=reference,
        hypothesis=result.text,
        duration=result.duration,
        errors=errors,
        truncated=result.truncated,
        alternatives=alternatives,
        oracle=min(every, key=lambda one: one.errors) if alternatives else None,
    )


def shard(cuts: Iterable[Cut], rank: int, world_size: int) -> list[Cut]:
    """Return the part of a set that one of ``world_size`` processes evaluates.

    Cuts are distributed in order of duration, so that all parts take about the same time;
    `effasr.evaluation.result.merge` joins the evaluations.
    """
    return sorted(cuts, key=lambda cut: (-cut.duration, cut.id))[rank::world_size]


def scorable_requests(
    cuts: Iterable[Cut], sample_rate: int
) -> tuple[list[tuple[str, Request]], list[Failure]]:
    """Return references with their requests, and the cuts that have no such pair."""
    scorable, failures = [], []
    for cut in cuts:
        texts: Sequence[str | None] = [supervision.text for supervision in cut.supervisions]
        if len(texts) != 1 or texts[0] is None:
            failures.append(Failure(cut.id, "no reference text: the cut needs one supervision"))
            continue
        try:
            prompt = prompt_of(cut)
        except ValueError as error:
            failures.append(Failure(cut.id, str(error)))
            continue
        load = partial(load_audio, cut, sample_rate)
        scorable.append((texts[0], Request(cut.id, load, prompt)))
    return scorable, failures


def _group(prompt: Prompt) -> str:
    if prompt.source == prompt.target:
        return prompt.source
    return f"{prompt.source}->{prompt.target}"
