"""Recognition of one stream with the search of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from effasr.data.tokenizer import Tokenizer
from effasr.decoding.checks import check_config
from effasr.decoding.confidence.calibration import load_calibration
from effasr.decoding.config import LM_WEIGHT, DecodingConfig
from effasr.decoding.lm.loading import load_lm
from effasr.model.asr import ASRModel
from effasr.model.checks import check
from effasr.transcription.inputs.prefetch import ahead
from effasr.transcription.online.recognizer import OnlineRecognizer
from effasr.transcription.online.streamable import check_model, context_for
from effasr.transcription.results import Segment


def transcribe_online(
    recognizer: OnlineRecognizer, blocks: Iterable[np.ndarray]
) -> Iterator[Segment]:
    """Transcribe audio while it arrives; yields segments as soon as they are final.

    Samples are read on a thread, so that the recorder need not wait during decoding.

    ``blocks``: float32 (samples,) each, mono, at the recognizer's rate, as they arrive.
    """
    stream = recognizer.open()
    for block in ahead(blocks):
        stream.feed(block)
        recognizer.decode()
        yield from stream.take()
    stream.finish()
    recognizer.decode()
    yield from stream.take()


def online_recognizer(
    model: ASRModel,
    tokenizer: Tokenizer,
    config: DecodingConfig,
    *,
    latency_seconds: float | None = None,
    spaces: bool = True,
) -> OnlineRecognizer:
    """Return a recognizer of one stream, with the search of a configuration.

    What it says of batches and of cutting recordings has no effect.
    """
    context = context_for(model, latency_seconds)
    method = check_model(model, config.method, [context])
    for name, remedy in (
        ("second_lm", "it reads the earlier segments of a recording, which is decoded as a whole"),
        ("corrector", "it corrects recordings as a whole"),
        ("confidence", "a stream has confidences of its words: use `word_confidence`"),
        ("score_parts", "scores are divided for tuning, on recordings"),
    ):
        value = getattr(config, name)
        check(not value, name, "be left out for a stream", value, remedy)
    # The times of words are those of the search, which needs no CTC head for them.
    check_config(model, replace(config, method=method, words=False))
    return OnlineRecognizer(
        model,
        tokenizer,
        context=context,
        method=method,
        max_symbols=config.max_symbols,
        beam=config.beam,
        nbest=config.nbest,
        lm=load_lm(config, model, tokenizer),
        lm_weight=LM_WEIGHT if config.lm_weight is None else config.lm_weight,
        words=config.words,
        word_confidence=config.word_confidence,
        calibration=load_calibration(config.calibration, method),
        spaces=spaces,
    )
