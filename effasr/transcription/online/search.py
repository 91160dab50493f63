"""The searches of streams: greedy or with a beam, of CTC and transducers."""

from __future__ import annotations

import math

from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_beam import CTCBeamStreams, Fusion
from effasr.decoding.ctc_greedy import CTCStreams
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.streams import BeamStreams
from effasr.decoding.tdt_beam import TDTBeamStreams
from effasr.decoding.transducer_beam import TransducerBeamStreams
from effasr.decoding.transducer_greedy import TransducerStreams
from effasr.model.asr import ASRModel
from effasr.model.checks import check


def check_beam(
    method: str, beam: int, nbest: int | None, lm: TokenLM | None, lm_weight: float
) -> None:
    """Check the options of a search."""
    check(beam >= 1, "beam", "be at least 1", beam)
    if nbest is not None:
        rule = "be at least 2 with `nbest` for a stream"
        remedy = "greedy search has no alternatives"
        check(beam > 1, "beam", rule, beam, remedy)
        check(1 <= nbest <= beam, "nbest", f"be from 1 to `beam` = {beam}", nbest)
    if lm is not None:
        rule, remedy = (
            "be ctc with `lm`",
            "only CTC can be joined with a language model in a stream",
        )
        check(method == "ctc", "method", rule, method, remedy)
        check(beam > 1, "beam", "be at least 2 with `lm`", beam)
        check(0 < lm_weight < math.inf, "lm_weight", "be above 0", lm_weight)


def stream_search(
    model: ASRModel,
    method: str,
    streams: int,
    *,
    max_symbols: int,
    beam: int,
    nbest: int,
    fusion: Fusion | None,
) -> CTCStreams | TransducerStreams | BeamStreams:
    """Return the search of a number of streams; see `OnlineRecognizer` for the options."""
    if beam > 1:
        return _beam_search(model, method, streams, beam, nbest, fusion)
    if method == "ctc":
        return CTCStreams(model, streams)
    assert model.transducer is not None
    return TransducerStreams(model.transducer, streams, max_symbols)


def _beam_search(
    model: ASRModel, method: str, streams: int, beam: int, nbest: int, fusion: Fusion | None
) -> BeamStreams:
    if method == "ctc":
        return CTCBeamStreams(model, streams, beam, nbest, fusion)
    assert model.transducer is not None
    # As many tokens as in recordings: the default is of frames of 80 ms.
    per_frame = DecodingConfig().tokens_per_frame * model.config.features.rows_per_frame / 8
    limit = DecodingConfig(tokens_per_frame=per_frame).max_tokens
    has_durations = model.transducer.config.durations is not None
    search = TDTBeamStreams if has_durations else TransducerBeamStreams
    return search(model.transducer, streams, beam, nbest, limit)
