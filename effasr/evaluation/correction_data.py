"""Text pairs from n-best lists to references, for a model that corrects transcripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lhotse.cut import Cut

from effasr.data.manifest.pairs import SOURCE_NAME, SOURCE_TEXT
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.evaluate import transcribe_cuts
from effasr.model.asr import ASRModel
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import Failure, Result
from effasr.transcription.second_pass.corrector import joined_texts, text_prompt


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
    its reference. Both are of the language of the text, so that the task is to transcribe. An
    utterance that was not transcribed, whose texts are all empty, or whose reference is, gives a
    failure. ``source_name`` becomes the ``source`` of each line.
    """
    recognizer = Recognizer(model, tokenizer, config)
    for reference, prompt, result in transcribe_cuts(recognizer, cuts, on_result):
        if isinstance(result, Failure):
            yield result
            continue
        source, text = joined_texts(result.alternatives), reference.strip()
        if not source or not text:
            empty = "its reference" if source else "every text of its list"
            yield Failure(result.id, f"no pair: {empty} is empty")
            continue
        target = text_prompt(prompt)
        yield {
            "id": result.id,
            SOURCE_TEXT: source,
            "text": text,
            "source_lang": target.source,
            "target_lang": target.target,
            "pnc": target.punctuation,
            **({} if source_name is None else {SOURCE_NAME: source_name}),
        }
