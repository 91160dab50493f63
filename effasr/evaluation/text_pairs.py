"""Evaluation on text pairs: what a model writes from the source texts, against the references."""

from __future__ import annotations

import time
from collections.abc import Iterable

from effasr.data.manifest.pairs import TextPair
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, ScoredUtterance
from effasr.evaluation.wer import count_errors
from effasr.model.asr import ASRModel
from effasr.transcription.results import Failure
from effasr.transcription.second_pass.text_to_text import TextToText


def evaluate_pairs(
    model: ASRModel,
    tokenizer: Tokenizer,
    pairs: Iterable[TextPair],
    *,
    normalizer: str = "basic",
    config: DecodingConfig | None = None,
) -> Evaluation:
    """Write a text from the source of each pair, and count the word errors.

    Args:
        model: Model with a text encoder; its training mode is restored.
        tokenizer: Tokenizer of the model.
        pairs: Source texts, references and languages.
        normalizer: See `effasr.evaluation.normalizer.get_normalizer`.
        config: See `effasr.transcription.second_pass.text_to_text.TextToText`.

    Returns:
        Results in the order of the pairs, of no duration. Pairs in a language that the tokenizer
        does not know, and those without an expert, are failures.

    Raises:
        ValueError: The normaliser is unknown, or the model cannot read texts.
    """
    started = time.perf_counter()
    normalize, writer = get_normalizer(normalizer), TextToText(model, tokenizer, config)
    known, failures = [], []
    for pair in pairs:
        try:
            writer.check(pair.prompt, pair.source_name)
        except ValueError as error:
            failures.append(Failure(pair.id, str(error)))
        else:
            known.append(pair)
    written = writer.write(
        [(pair.source, pair.prompt) for pair in known],
        sources=[pair.source_name for pair in known],
    )
    utterances = []
    for pair, found in zip(known, written, strict=True):
        source, target = pair.prompt.source, pair.prompt.target
        utterances.append(
            ScoredUtterance(
                id=pair.id,
                group=source if source == target else f"{source}->{target}",
                reference=pair.text,
                hypothesis=found.text,
                duration=0.0,
                errors=count_errors(normalize(pair.text), normalize(found.text)),
                truncated=found.truncated,
            )
        )
    seconds = time.perf_counter() - started
    return Evaluation(normalizer, tuple(utterances), tuple(failures), seconds, method="attention")
