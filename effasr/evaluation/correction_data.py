"""Text pairs from n-best lists to references, for a model that corrects transcripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lhotse.cut import Cut

from effasr.data.manifest.pairs import SOURCE_NAME, SOURCE_TEXT
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.evaluate import scorable_requests
from effasr.model.asr import ASRModel
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import Failure, Result, Transcription
from effasr.transcription.second_pass.corrector import joined_texts, text_prompt


def listed_texts(result: Transcription) -> str:
    """Return the different texts of a recording, the best first, with separators."""
    return joined_texts(result.alternatives)


def correction_pairs(
    model: ASRModel,
    tokenizer: Tokenizer,
    cuts: Iterable[Cut],
    config: DecodingConfig,
    on_result: Callable[[Result], None] | None = None,
    source_name: str | None = None,
) -> Iterator[dict[str, Any] | Failure]:
    """Yield the lines of a manifest of text pairs, which `effasr.data.manifest.pairs` reads.

    ``source_text`` is the list of an utterance, of the ``config.nbest`` best texts, and ``text``
    its reference. Both are of the language of the text, so that the task is to transcribe.

    Args:
        model: Decodes on its device; its training mode is restored.
        tokenizer: Tokenizer of the model.
        cuts: Cuts with one supervision each.
        config: With ``nbest``.
        on_result: Called with each result, for example to show progress.
        source_name: Name of what the lists come from, which each line has as ``source``; None for
            none.

    Yields:
        A failure for an utterance that was not transcribed, whose texts are all empty, or whose
        reference is.

    Raises:
        ValueError: The model does not support the configuration.
    """
    recognizer = Recognizer(model, tokenizer, config)
    scorable, failures = scorable_requests(cuts, recognizer.sample_rate)
    yield from failures
    results = recognizer.results(wanted for _, wanted in scorable)
    for (reference, wanted), result in zip(scorable, results, strict=True):
        if on_result is not None:
            on_result(result)
        if isinstance(result, Failure):
            yield result
            continue
        source, text = listed_texts(result), reference.strip()
        if not source or not text:
            what = "its reference" if source else "every text of its list"
            yield Failure(result.id, f"no pair: {what} is empty")
            continue
        prompt = text_prompt(wanted.prompt)
        yield {
            "id": result.id,
            SOURCE_TEXT: source,
            "text": text,
            "source_lang": prompt.source,
            "target_lang": prompt.target,
            "pnc": prompt.punctuation,
            **({} if source_name is None else {SOURCE_NAME: source_name}),
        }
