"""Evaluation of a model on a set of recordings or of text pairs."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lhotse.cut import Cut

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.pairs import TextPair
from effasr.data.manifest.reader import named
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, ScoredUtterance
from effasr.evaluation.translation import check_package
from effasr.evaluation.wer import ErrorCounts, count_errors
from effasr.evaluation.word_confidence import judge
from effasr.model.asr import ASRModel
from effasr.transcription.recognizer import Recognizer, Request
from effasr.transcription.results import Failure, Result, Transcription
from effasr.transcription.second_pass.text_to_text import TextToText


def openable_cuts(
    path: str | Path, *, prompt: Prompt, progress: Callable[[int], None] = lambda count: None
) -> tuple[list[Cut], list[Failure], int]:
    """Return the cuts of a manifest, and a failure for each line whose audio cannot be opened.

    What a line does not say is as in ``prompt``. Also returns how many cuts name no language.
    """
    cuts, failures, assumed = [], [], 0
    for count, (name, utterance) in enumerate(named(path, prompt=prompt), 1):
        try:
            cuts.append(utterance.cut(name))
            assumed += "lang" not in utterance.stated
        except AudioError as error:
            failures.append(Failure(name, str(error)))
        progress(count)
    if not cuts and not failures:
        raise ValueError(f"{path}: holds no utterances.")
    return cuts, failures, assumed


def transcribe_cuts(
    recognizer: Recognizer,
    cuts: Iterable[Cut],
    on_result: Callable[[Result], None] | None = None,
) -> Iterator[tuple[str, Prompt, Result]]:
    """Yield reference, prompt and result of each cut; failures of invalid cuts come first."""
    scorable: list[tuple[str, Request]] = []
    for cut in cuts:
        texts: Sequence[str | None] = [supervision.text for supervision in cut.supervisions]
        if len(texts) != 1 or texts[0] is None:
            reason = "no reference text: the cut needs one supervision"
            yield "", Prompt(), Failure(cut.id, reason)
            continue
        try:
            prompt = prompt_of(cut)
        except ValueError as error:
            yield "", Prompt(), Failure(cut.id, str(error))
            continue
        if prompt.task == "translate":
            check_package()
        load = partial(load_audio, cut, recognizer.sample_rate)
        scorable.append((texts[0], Request(cut.id, load, prompt)))
    results = recognizer.results(request for _, request in scorable)
    for (reference, request), result in zip(scorable, results, strict=True):
        # Its language may be one that was heard.
        yield reference, getattr(result, "prompt", request.prompt), result
        if on_result is not None:
            on_result(result)


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
    """Transcribe cuts and compare with their references; the model's training mode is restored.

    Each cut is decoded with the prompt of its manifest. Cuts without a reference, with unreadable
    audio, in a language that the tokenizer does not know, or to be translated by CTC are counted in
    ``failures``, beside those given, which are no cuts (`openable_cuts`). An empty reference is
    valid: all recognised words are insertions. Only the counts depend on the normalizer.
    """
    started = time.perf_counter()
    get_normalizer(normalizer)  # an unknown name is the caller's error
    recognizer = Recognizer(model, tokenizer, config)
    settings = recognizer.config
    failed, utterances = [*failures], []
    for reference, prompt, result in transcribe_cuts(recognizer, cuts, on_result):
        if isinstance(result, Failure):
            failed.append(result)
            continue
        normalize = get_normalizer(normalizer, prompt.target)
        scored = _scored(reference, prompt, result, normalize)
        words, has_spaces = result.word_confidences, prompt.target not in WITHOUT_SPACES
        if settings.word_confidence and words is not None and has_spaces:
            scored = replace(scored, judged=judge(normalize(reference), words, normalize))
        utterances.append(scored)
    return Evaluation(
        normalizer,
        tuple(utterances),
        tuple(failed),
        time.perf_counter() - started,
        method=recognizer.method,
        search=_search(recognizer.method, settings),
        vad=recognizer.vad,
        calibrated=settings.calibration is not None if settings.word_confidence else None,
    )


def _scored(
    reference: str, prompt: Prompt, result: Transcription, normalize: Callable[[str], str]
) -> ScoredUtterance:
    expected, alternatives = normalize(reference), result.alternatives
    errors = count_errors(expected, normalize(result.text))
    # Different alternatives are often the same words.
    texts = {normalize(text.text) for text in alternatives} - {normalize(result.text)}
    counts = [errors, *(count_errors(expected, text) for text in sorted(texts))]
    return ScoredUtterance(
        id=result.id,
        group=_group(prompt),
        reference=reference,
        hypothesis=result.text,
        duration=result.duration,
        errors=errors,
        truncated=result.truncated,
        alternatives=alternatives,
        oracle=min(counts, key=lambda count: count.errors) if alternatives else None,
    )


def evaluate_pairs(
    model: ASRModel,
    tokenizer: Tokenizer,
    pairs: Iterable[TextPair],
    *,
    normalizer: str = "basic",
    config: DecodingConfig | None = None,
) -> Evaluation:
    """Write a text from each pair's source, and compare; unknown languages fail."""
    started = time.perf_counter()
    get_normalizer(normalizer)
    writer = TextToText(model, tokenizer, config)
    writable, failures = [], []
    for pair in pairs:
        if pair.prompt.task == "translate":
            check_package()
        try:
            writer.check(pair.prompt)
        except ValueError as error:
            failures.append(Failure(pair.id, str(error)))
        else:
            writable.append(pair)
    written = writer.write([(pair.source, pair.prompt) for pair in writable])
    utterances = [
        ScoredUtterance(
            id=pair.id,
            group=_group(pair.prompt),
            reference=pair.text,
            hypothesis=text.text,
            duration=0.0,
            errors=_errors(get_normalizer(normalizer, pair.prompt.target), pair.text, text.text),
            truncated=text.truncated,
        )
        for pair, text in zip(writable, written, strict=True)
    ]
    seconds = time.perf_counter() - started
    return Evaluation(
        normalizer,
        tuple(utterances),
        tuple(failures),
        seconds,
        method=writer.config.method,
        search=_search(writer.config.method, writer.config),
    )


def _errors(normalize: Callable[[str], str], reference: str, hypothesis: str) -> ErrorCounts:
    return count_errors(normalize(reference), normalize(hypothesis))


def shard(cuts: Iterable[Cut], rank: int, world_size: int) -> list[Cut]:
    """Return the part of a set that a process evaluates; all parts take about the same time."""
    return sorted(cuts, key=lambda cut: (-cut.duration, cut.id))[rank::world_size]


def _search(method: str, config: DecodingConfig) -> str:
    width = "greedy" if config.beam == 1 else f"beam {config.beam}"
    models = (config.lm, config.second_lm)
    return f"{method}, {width}{', language model' if any(models) else ''}"


def _group(prompt: Prompt) -> str:
    if prompt.source == prompt.target:
        return prompt.source
    return f"{prompt.source}->{prompt.target}"
