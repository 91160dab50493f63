"""Streams have lists and confidences as whole recordings have, and end cleanly."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from effasr.decoding.confidence.tokens import StreamConfidences, token_confidences
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_beam import CTCBeamStreams, ctc_beam
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.loading import load_boost
from effasr.decoding.streams import BeamStreams
from effasr.decoding.tdt_beam import tdt_beam
from effasr.decoding.transducer_beam import TransducerBeamStreams, transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.transcription.online import OnlineRecognizer, online_recognizer
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import word_confidences
from effasr_kernels import PackedSequence
from tests.support.streaming_model import CONTEXTS, RATE, encoded_by, pieces, recognized

BEAM, NBEST = 4, 3
LISTED = DecodingConfig(beam=BEAM, nbest=NBEST, word_confidence=True)


def calm(model: ASRModel) -> ASRModel:
    """Make blanks likelier, so that no transcript reaches the limit of its length."""
    head = model.transducer
    if head is not None:
        with torch.no_grad():
            head.output.bias[head.blank_id] += 6 if head.config.durations else 9
    return model


@torch.no_grad()
def offline(
    model: ASRModel, encoded: PackedSequence, beam: int, boost: BoostTree | None = None
) -> list[Hypothesis]:
    head = model.transducer
    if beam == 1:
        search = transducer_greedy if head else ctc_greedy
        arguments = (head, encoded, 10) if head else (model, encoded, model.vocab_size)
        return [Hypothesis(tuple(search(*arguments, boost)[0]), 0.0, 0.0)]
    if head is None:
        return ctc_beam(model, encoded, beam, nbest=NBEST, boost=boost)[0]
    limits = [DecodingConfig().max_tokens(frames) for frames in encoded.layout.lengths]
    search = transducer_beam if head.config.durations is None else tdt_beam
    return search(head, encoded, beam, limits, NBEST, boost=boost)[0]


@pytest.mark.parametrize("boosted", [False, True])
@pytest.mark.parametrize("beam", [1, BEAM])
@pytest.mark.parametrize("head", ["ctc", "stateless", "tdt"])
def test_a_stream_has_the_list_of_the_whole_recording(
    streaming_model, tokenizer, noise, head, beam, boosted, tmp_path
) -> None:
    """Of greedy search there is the transcript alone, with the confidences of its words."""
    model, audio = calm(streaming_model(head)), noise(2.3)
    encoded = encoded_by(model, audio)
    config = LISTED if beam > 1 else DecodingConfig(word_confidence=True)
    boost = None
    if boosted:
        phrases = tmp_path / "phrases.txt"
        phrases.write_text("one\nseven eight\nthree\n")
        config = replace(config, boost=phrases)
        boost = load_boost(config, model, tokenizer)
    expected = offline(model, encoded, beam, boost)
    assert len(expected) == (NBEST if beam > 1 else 1)
    assert len(expected[0].tokens) > 2
    assert len(expected[0].tokens) < 20 or beam == 1, "no transcript may reach its limit"
    texts = [tokenizer.decode(list(item.tokens)).strip() for item in expected]
    for size in (0, 9000):
        recognizer = OnlineRecognizer(
            model, tokenizer, config, context=CONTEXTS[0], endpoint_seconds=None
        )
        _, (segment,) = recognized(recognizer, pieces(audio, size))
        assert segment.text == texts[0]
        if beam > 1:
            assert [item.text for item in segment.alternatives] == texts
            scores = [item.score for item in segment.alternatives]
            assert scores == pytest.approx([item.score for item in expected], abs=1e-3)
        tokens = expected[0].tokens
        (sure,) = token_confidences(model, recognizer.method, encoded, [()], [tokens])
        assert sure is not None
        words = word_confidences(tokens, sure, tokenizer.decode)
        assert segment.word_confidences is not None
        assert [item.text for item in segment.word_confidences] == [item.text for item in words]
        values = [item.confidence for item in segment.word_confidences]
        assert values == pytest.approx([item.confidence for item in words], abs=1e-4)


@pytest.mark.parametrize("head", ["stateless", "rnnt"])
@torch.inference_mode()
def test_confidences_of_a_later_segment_know_the_labels_before(
    streaming_model, noise, head
) -> None:
    """Both segments together have those of one transcript in which blanks divide them."""
    model = streaming_model(head)
    rows = encoded_by(model, noise(1.5)).values
    labels = [4, 9, 6, 11]
    (whole,) = token_confidences(model, "transducer", encoded_by(model, noise(1.5)), [()], [labels])
    for split in (0, 2):
        result = StreamConfidences(model, "transducer")
        result.add(rows)
        result.of_segment(labels[:split], 0)
        later = result._predicted(labels[split:])
        alone = StreamConfidences(model, "transducer")._predicted(labels)
        torch.testing.assert_close(later, alone[split:], rtol=1e-5, atol=1e-6)
    result = StreamConfidences(model, "transducer")
    result.add(rows)
    assert result.of_segment(labels, len(rows)) == pytest.approx(whole, abs=1e-5)
    result.forget(7)
    assert (result._first, sum(map(len, result._rows))) == (7, len(rows) - 7)


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("head", ["ctc", "rnnt", "tdt"])
def test_hostile_streams_end_cleanly(streaming_model, tokenizer, head, beam) -> None:
    """Models that say labels in each frame, packets of one sample, and next to no audio."""
    config = DecodingConfig(
        beam=beam, nbest=2 if beam > 1 else None, word_confidence=True, words=True
    )
    recognizer = OnlineRecognizer(streaming_model(head), tokenizer, config)
    single = [np.full(1, 0.1, np.float32)] * 300
    loud = [np.sign(np.sin(np.arange(RATE, dtype=np.float32)))]
    for packets in ([], [np.zeros(50)], single, loud, [np.zeros(0, np.float32)]):
        stream, segments = recognized(recognizer, packets)
        assert stream.tokens == []
        assert segments == [] or packets in (single, loud)
        for segment in segments:
            assert np.isfinite([item.score for item in segment.alternatives]).all()
    assert recognizer._open == [None]


def test_wrong_samples_are_refused(streaming_model, tokenizer) -> None:
    recognizer = OnlineRecognizer(streaming_model("rnnt"), tokenizer)
    stream = recognizer.open()
    with pytest.raises(ValueError, match="`streams` must be more than 1 to open another one"):
        recognizer.open()
    for wrong, message in (
        (np.array([0.1, np.nan]), "`samples` must be finite"),
        (np.array([0.1, 1e300]), "`samples` must be finite"),
        (np.array([-1e30, 0.1], np.float32), "`samples` must be finite"),
        (np.zeros((2, 2)), r"`samples` must be floating numbers \(samples,\)"),
        (np.zeros(3, np.int16), "divide 16-bit integers by 32768"),
    ):
        with pytest.raises(ValueError, match=message):
            stream.feed(wrong)
    stream.finish()
    with pytest.raises(ValueError, match="`samples` must come before `finish`"):
        stream.feed(np.zeros(4, np.float32))


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("head", ["ctc", "tdt"])
def test_silence_takes_no_more_memory(streaming_model, tokenizer, head, beam) -> None:
    config = DecodingConfig(beam=beam, word_confidence=True)
    model = calm(streaming_model(head))
    recognizer = OnlineRecognizer(model, tokenizer, config, context=CONTEXTS[2])
    stream, held = recognizer.open(), []
    for second in range(24):
        stream.feed(np.zeros(RATE, np.float32))
        recognizer.decode()
        stream.take()
        assert stream._segments._confidences is not None
        rows = sum(map(len, stream._segments._confidences._rows))
        search, labels = recognizer._search, len(stream.tokens)
        if isinstance(search, BeamStreams):
            labels = max(len(item.tokens) for item in search._hypotheses(0))
            # What it has read long ago does not count in what comes.
            if not stream.tokens and second > 4:
                assert stream.frames - stream._segments._since < 40
        held.append((rows, labels, sum(map(len, stream._audio._parts))))
    assert max(rows for rows, _, _ in held[6:]) < 450
    assert max(labels for _, labels, _ in held[6:]) < 200
    assert max(samples for _, _, samples in held) < 2 * RATE


def test_the_configuration_chooses_the_search(streaming_model, tokenizer) -> None:
    model = streaming_model("ctc")
    config = DecodingConfig(beam=3, nbest=2, word_confidence=True)
    recognizer = Recognizer(model, tokenizer, config).stream().recognizer
    assert isinstance(recognizer._search, CTCBeamStreams)
    assert (recognizer._search.beam, recognizer.segment_options.nbest) == (3, 2)
    assert recognizer.segment_options.word_confidence
    rnnt = streaming_model("stateless")
    other = online_recognizer(rnnt, tokenizer, DecodingConfig(beam=2), latency_seconds=0.08)
    assert isinstance(other._search, TransducerBeamStreams)
    assert other.context == CONTEXTS[1]
    lm = Path("words.arpa")
    for made, options, message in (
        (model, {"nbest": 1}, "`beam` must be at least 2 with `nbest` for a stream, but is 1"),
        (model, {"lm": lm}, "`beam` must be at least 2 for CTC with the language model words.arpa"),
        (rnnt, {"lm": lm, "beam": 2}, "`lm` must be left out for the method transducer"),
        (model, {"confidence": True}, "`confidence` must be left out for a stream"),
        (model, {"corrector": lm, "beam": 2, "nbest": 2}, "`corrector` must be left out for a st"),
        (model, {"length_penalty": 1.0}, "`length_penalty` must be left out for the method ctc"),
    ):
        with pytest.raises(ValueError, match=message):
            OnlineRecognizer(made, tokenizer, DecodingConfig(**options))
