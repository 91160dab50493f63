"""Streams are recognized frame by frame as whole recordings are with the same context."""

import dataclasses
import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr.data.audio.loudness import is_speech, loudness
from effasr.data.prompt import Prompt
from effasr.decoding.confidence.tokens import StreamConfidences, token_confidences
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_beam import CTCBeamStreams, ctc_beam
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.loading import load_boost
from effasr.decoding.streams import BeamStreams
from effasr.decoding.transducer_beam import TransducerBeamStreams, tdt_beam, transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.model.language_prompt import LanguagePromptConfig
from effasr.transcription.inputs import arrival
from effasr.transcription.online import (
    OnlineRecognizer,
    OnlineStream,
    context_for,
    is_streamable,
    online_recognizer,
    transcribe_online,
)
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import Segment, word_confidences
from effasr.transcription.word_timestamps import word_timestamps
from effasr_kernels import Context, PackedSequence
from tests.support.streaming_model import CONTEXTS, HEADS, RATE, encoded_by, pieces, recognized

WORDS = DecodingConfig(words=True)


def _offline(model: ASRModel, audio: np.ndarray, context: Context) -> tuple[Tensor, list[int]]:
    """Encoder output, (T, width), and tokens of a whole recording."""
    encoded = encoded_by(model, audio, context)
    with torch.no_grad():
        if model.transducer is not None:
            (tokens,) = transducer_greedy(model.transducer, encoded, 10)
        else:
            (tokens,) = ctc_greedy(model, encoded, model.vocab_size)
    return encoded.values, tokens


def _recorded(recognizer: OnlineRecognizer) -> dict[int, list[Tensor]]:
    """What the encoder gives to the search, by slot."""
    result: dict[int, list[Tensor]] = {slot: [] for slot in range(len(recognizer._open))}
    search = recognizer._search.step

    def step(encoded: Tensor, frames: Sequence[int]) -> list:
        for slot, count in enumerate(frames):
            result[slot].append(encoded[slot, :count].clone())
        return search(encoded, frames)

    recognizer._search.step = step  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("size", [0, 4000, 1280, 100_000], ids=lambda size: f"pieces_{size}")
@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.representative(size=0)
@pytest.mark.representative(head="tdt", context=CONTEXTS[0])
def test_a_stream_is_the_whole_recording(
    streaming_model, tokenizer, noise, head, context, size
) -> None:
    model = streaming_model(head)
    for seconds in (3.7, 0.31):
        audio = noise(seconds, seed=int(seconds))
        expected, tokens = _offline(model, audio, context)
        recognizer = OnlineRecognizer(model, tokenizer, context=context, endpoint_seconds=None)
        encoded, stream = _recorded(recognizer), recognizer.open()
        received: list[int] = []
        for piece in pieces(audio, size):
            stream.feed(piece)
            recognizer.decode()
            # What is recognized stays.
            assert stream.tokens[: len(received)] == received
            received = stream.tokens
        stream.finish()
        before = list(stream.tokens)
        recognizer.decode()
        assert stream.done
        torch.testing.assert_close(torch.cat(encoded[0]), expected, rtol=1e-5, atol=1e-5)
        assert tokens[: len(before)] == before
        text = " ".join(segment.text for segment in stream.take())
        assert text == tokenizer.decode(tokens).strip()
        if seconds > 1:
            assert len(tokens) > 5


def test_a_stream_is_told_its_language(streaming_model, tokenizer, noise) -> None:
    """As a Nemotron 3.5 is; other languages make other texts."""
    plain, prompts, texts = streaming_model("rnnt", causal=True), {"en": 0, "de": 1}, []
    told = LanguagePromptConfig(languages=prompts, count=2, width=32)
    model = ASRModel(dataclasses.replace(plain.config, language_prompt=told), plain.vocab_size)
    model.eval().load_state_dict(plain.state_dict(), strict=False)
    assert is_streamable(model)
    for language, number in prompts.items():
        audio, options = noise(3.7, seed=3), {"prompt": Prompt(language, language)}
        encoded = encoded_by(model, audio, CONTEXTS[0], number)
        recognizer = OnlineRecognizer(model, tokenizer, endpoint_seconds=None, **options)
        received = _recorded(recognizer)
        texts.append([x.text for x in recognized(recognizer, pieces(audio, 4000))[1]])
        torch.testing.assert_close(torch.cat(received[0]), encoded.values, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            (tokens,) = transducer_greedy(model.transducer, encoded, 10)
        assert " ".join(texts[-1]) == tokenizer.decode(tokens).strip()
    assert texts[0] != texts[1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "hop"), [(512, 160), (300, 200)])
def test_other_windows_and_the_last_rows(
    streaming_model, tokenizer, noise, window, hop, causal
) -> None:
    """Lengths that end in every place of a row, of a frame and of a chunk."""
    model = streaming_model("ctc", causal=causal, window=window, hop=hop)
    model.encoder.evaluate_with(CONTEXTS[0])
    recognizer = OnlineRecognizer(model, tokenizer, context=CONTEXTS[0])
    encoded = _recorded(recognizer)
    audio = noise(2)
    chunk = hop * 8 * CONTEXTS[0].chunk
    around = (-3 * hop, 0, 1, hop - 1, hop, window // 2 - 1, window // 2 + 1, window, hop * 8)
    for samples in [chunk * n + more for n in (0, 1, 2) for more in around]:
        recognized(recognizer, [audio[:samples]])
        result = torch.cat([torch.zeros(0, 32), *encoded[0]])
        encoded[0].clear()
        expected, _ = _offline(model, audio[:samples], CONTEXTS[0])
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_many_streams_do_not_touch_each_other(streaming_model, tokenizer, noise, head) -> None:
    """They begin, pause and end at different times, in slots that others have used."""
    model, context = streaming_model(head), CONTEXTS[0]
    recordings = [noise(0.4 + 0.7 * seed, seed) for seed in range(5)]
    recognizer = OnlineRecognizer(
        model, tokenizer, context=context, streams=2, endpoint_seconds=None
    )
    waiting = list(enumerate(recordings))
    running: dict[int, tuple[OnlineStream, Iterator[np.ndarray]]] = {}
    texts = {}
    while waiting or running:
        while waiting and len(running) < 2:
            name, audio = waiting.pop()
            running[name] = recognizer.open(), pieces(audio, 3000 + 500 * name)
        for name, (stream, coming) in list(running.items()):
            piece = next(coming, None)
            if piece is None:
                stream.finish()
            else:
                stream.feed(piece)
            recognizer.decode()
            if stream.done:
                texts[name] = " ".join(segment.text for segment in stream.take())
                del running[name]
    for name, audio in enumerate(recordings):
        assert texts[name] == tokenizer.decode(_offline(model, audio, context)[1]).strip()


def test_pauses_end_segments(streaming_model, tokenizer, noise) -> None:
    model = streaming_model("ctc")
    audio = noise(5)
    _, tokens = _offline(model, audio, CONTEXTS[0])
    recognizer = OnlineRecognizer(model, tokenizer, endpoint_seconds=0.24)
    stream, segments = recognized(recognizer, [audio])
    assert len(segments) > 1
    assert stream.take() == []
    for item, after in pairwise(segments):
        # Three frames without a token.
        assert after.start - item.end >= 0.24 - 1e-6
    assert segments[-1].end <= 5
    assert "".join(segment.text.replace(" ", "") for segment in segments) == tokenizer.decode(
        tokens
    ).replace(" ", "")


def test_a_long_segment_ends_before_a_word(streaming_model, tokenizer, noise) -> None:
    """This model never makes a pause."""
    model, audio = streaming_model("ctc"), noise(12)
    _, tokens = _offline(model, audio, CONTEXTS[0])
    texts = []
    for longest in (3.0, 0.01, None):
        recognizer = OnlineRecognizer(
            model, tokenizer, endpoint_seconds=None, longest_seconds=longest
        )
        stream = recognizer.open()
        for piece in pieces(audio, 0):
            stream.feed(piece)
            recognizer.decode()
            if longest is not None:
                held = [frame for _, frame in stream._segments.tokens]
                assert not held or held[-1] - held[0] < 2 * longest / recognizer.frame_seconds
        stream.finish()
        recognizer.decode()
        texts.append([segment.text for segment in stream.take()])
    by_word, by_token, whole = texts
    assert whole == [tokenizer.decode(tokens).strip()]
    assert " ".join(by_word) == whole[0]
    assert len(by_word) == 3
    assert len(by_token) > len(whole[0].split())


@pytest.mark.parametrize("head", ["ctc", "tdt"])
def test_words_are_timed_by_the_frames_of_their_tokens(
    streaming_model, tokenizer, noise, head
) -> None:
    model, audio = streaming_model(head), noise(4)
    # Pauses, which the words respect.
    audio[: RATE // 2] = audio[2 * RATE : 3 * RATE] = 0
    recognizer = OnlineRecognizer(model, tokenizer, WORDS, endpoint_seconds=None)
    emitted: list[tuple[int, int]] = []
    search = recognizer._search.step

    def step(encoded: Tensor, frames: Sequence[int]) -> list:
        result = search(encoded, frames)
        frames_before = recognizer._open[0].frames
        emitted.extend((item.token, frames_before + item.frame) for item in result[0])
        return result

    recognizer._search.step = step  # type: ignore[method-assign]
    _, (segment,) = recognized(recognizer, pieces(audio, 0))
    assert segment.words is not None
    expected = word_timestamps(
        [token for token, _ in emitted],
        [(frame, frame + 1) for _, frame in emitted],
        tokenizer.decode,
        frame_seconds=recognizer.frame_seconds,
        speech=is_speech(loudness(audio, RATE)),
    )
    assert [word.text for word in segment.words] == segment.text.split()
    assert (segment.start, segment.end) == (segment.words[0].start, segment.words[-1].end)
    assert [word.text for word in expected] == segment.text.split()
    for result, word in zip(segment.words, expected, strict=True):
        # Loudness is averaged over 50 ms, but not across chunks.
        assert result.start == pytest.approx(word.start, abs=0.031)
        assert result.end == pytest.approx(min(word.end, 4), abs=0.031)


@pytest.mark.parametrize("ends", [(0.1, None), (None, 0.5)], ids=["pauses", "length"])
def test_words_of_segments_follow_each_other(streaming_model, tokenizer, noise, ends) -> None:
    options = dict(zip(("endpoint_seconds", "longest_seconds"), ends, strict=True))
    recognizer = OnlineRecognizer(streaming_model("ctc"), tokenizer, WORDS, **options)
    _, segments = recognized(recognizer, pieces(noise(6), 4000))
    assert len(segments) > 3
    words = [time for item in segments for word in item.words for time in (word.start, word.end)]
    assert words == sorted(words)
    spans = [time for item in segments for time in (item.start, item.end)]
    assert spans == sorted(spans)
    assert spans[-1] == words[-1] <= 6


def _bytes_of_tensors() -> int:
    """Bytes of all tensors that Python objects hold."""
    gc.collect()
    held = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        # Storage of oneDNN's own layout is not accessible.
        if type(item) is Tensor and item.layout == torch.strided
    }
    return sum(held.values())


@pytest.mark.parametrize("head", ["ctc", "stateless"])
@pytest.mark.representative(head="stateless")
def test_64_streams_take_no_more_memory_with_time(streaming_model, tokenizer, noise, head) -> None:
    """`bench.py inference --streams 64 --longest 3600 --tick 1` runs them for an hour."""
    count, audio = 64, noise(3)
    recognizer = OnlineRecognizer(
        streaming_model(head), tokenizer, DecodingConfig(words=True, max_symbols=1),
        context=CONTEXTS[2], streams=count, longest_seconds=1.0,
    )  # fmt: skip
    streams = [recognizer.open() for _ in range(count)]
    chunk, tensors, samples, words = round(recognizer.latency_seconds * RATE), [], [], 0
    for step in range(8):
        for number, stream in enumerate(streams):
            start = (number * 700 + step * chunk) % (len(audio) - chunk)
            stream.feed(audio[start : start + chunk])
        assert recognizer.decode() == (count if step else 0)
        words += sum(len(segment.words or ()) for item in streams for segment in item.take())
        if step in (3, 7):
            tensors.append(_bytes_of_tensors())
        parts = [part for item in streams for part in item._audio._parts]
        held = [part if part.base is None else part.base for part in parts]
        samples.append(sum(map(len, held)))
        loudness = [item._segments._loudness for item in streams]
        assert all(len(item.levels) < 400 for item in loudness if item)
    assert words > 5
    assert tensors[0] == tensors[1]
    assert samples[1:] == [samples[1]] * 7
    for stream in streams:
        stream.finish()
    recognizer.decode()
    assert all(stream.done for stream in streams)


def test_the_latency_chooses_the_context(streaming_model, tokenizer) -> None:
    model = streaming_model("ctc")
    assert context_for(model, None) == CONTEXTS[0]
    assert context_for(model, 0.08) == CONTEXTS[1]
    assert context_for(model, 0.24) == CONTEXTS[0]
    assert context_for(model, 9) == CONTEXTS[2]
    with pytest.raises(ValueError, match=r"`latency_seconds` must be at least 0\.08 .* is 0\.05"):
        context_for(model, 0.05)
    recognizer = Recognizer(model, tokenizer)
    stream = recognizer.stream(latency_seconds=0.1)
    assert stream.recognizer.latency_seconds == pytest.approx(0.08)
    # What was requested is not replaced in silence.
    recognizer.config = dataclasses.replace(recognizer.config, method="attention")
    with pytest.raises(ValueError, match="`method` must be auto, transducer or ctc for a stream"):
        recognizer.stream()


def test_a_model_that_looks_ahead_is_refused(streaming_model, model, tokenizer) -> None:
    assert is_streamable(streaming_model("tdt"))
    assert not is_streamable(model)
    with pytest.raises(ValueError, match=r"`encoder\.causal_convolution` must be true to decode"):
        OnlineRecognizer(model, tokenizer)
    normalized = streaming_model("ctc", normalize=True)
    with pytest.raises(ValueError, match=r"`features\.normalize` must be false to decode a stream"):
        OnlineRecognizer(normalized, tokenizer)
    with pytest.raises(ValueError, match="`method` must be an output of the model, but is 'ctc'"):
        OnlineRecognizer(streaming_model("tdt"), tokenizer, DecodingConfig(method="ctc"))
    with pytest.raises(ValueError, match="`attention` must be auto to decode frame by frame"):
        online_recognizer(streaming_model("tdt"), tokenizer, DecodingConfig(attention="cpp"))
    whole = ASRModel(
        dataclasses.replace(
            streaming_model("ctc").config,
            encoder=dataclasses.replace(streaming_model("ctc").config.encoder, context=()),
        ),
        tokenizer.vocab_size,
    )
    for long in (Context(10**9, 0, 1), Context(0, 0, 10**9)):
        with pytest.raises(ValueError, match=r"`context\.(left|chunk)` must be at most 10000"):
            OnlineRecognizer(streaming_model("ctc"), tokenizer, context=long)
    with pytest.raises(ValueError, match=r"`model\.encoder\.context` must be given"):
        context_for(whole, 0.2)


def test_a_stalled_source_ends_a_segment(streaming_model, tokenizer, noise, monkeypatch) -> None:
    monkeypatch.setattr(arrival, "_STALL_S", 0.05)
    model = streaming_model("ctc")
    recognizer = OnlineRecognizer(model, tokenizer, WORDS, context=CONTEXTS[0])
    audio = noise(2.3, seed=2)
    received: list[Segment] = []
    read = threading.Event()

    def blocks() -> Iterator[np.ndarray]:
        yield audio
        assert read.wait(60), "the segment comes before any further sample"
        yield audio

    for segment in transcribe_online(recognizer, blocks()):
        received.append(segment)
        read.set()
    half = len(received) // 2
    assert half >= 1
    assert received[half:] == [segment.later(2.3) for segment in received[:half]]


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
        (model, {"second_lm": lm, "beam": 2, "nbest": 2}, "`second_lm` must be left out for a st"),
        (model, {"length_penalty": 1.0}, "`length_penalty` must be left out for the method ctc"),
    ):
        with pytest.raises(ValueError, match=message):
            OnlineRecognizer(made, tokenizer, DecodingConfig(**options))
