import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from effasr.decoding.ctc_alignment import viterbi
from effasr.transcription.inputs.sources import Source, find
from effasr.transcription.outputs.cues import Cue, cues
from effasr.transcription.outputs.subtitles import GrowingFile, ctm, srt, vtt
from effasr.transcription.outputs.writers import ResultWriter
from effasr.transcription.results import Failure, Segment, Transcription
from effasr.transcription.word_timestamps import Word, word_timestamps


def best_by_trial(scores: np.ndarray, text: Sequence[int]) -> float:
    """The score of the likeliest path, by trying all of them."""
    best = -math.inf
    for path in itertools.product(range(len(text) + 1), repeat=len(scores)):
        merged = [a for a, _ in itertools.groupby(path)]
        if [a for a in merged if a] == list(range(1, len(text) + 1)) and all(
            text[a - 1] != text[b - 1] for a, b in itertools.pairwise(merged) if a and b
        ):
            best = max(best, sum(scores[t, a] for t, a in enumerate(path)))
    return best


@pytest.mark.parametrize("text", [[5], [5, 6], [5, 5], [5, 6, 5], [4, 4, 4]])
@pytest.mark.parametrize("seed", range(4))
def test_the_path_is_the_likeliest(text, seed) -> None:
    scores = np.log(np.random.default_rng(seed).dirichlet(np.ones(len(text) + 1), size=6))
    spans = viterbi(scores, text)
    assert spans is not None
    best = scores[:, 0].sum() + sum(
        (scores[a:b, position + 1] - scores[a:b, 0]).sum() for position, (a, b) in enumerate(spans)
    )
    assert best == pytest.approx(best_by_trial(scores, text))
    assert all(a < b for a, b in spans)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_too_few_frames_have_no_path() -> None:
    scores = np.zeros((2, 3))
    assert viterbi(scores, [5, 6]) == [(0, 1), (1, 2)]
    assert viterbi(scores, [5, 5]) is None
    assert viterbi(scores[:1], [5, 6]) is None
    assert viterbi(np.zeros((0, 2)), [5]) is None


PIECES = {1: " one", 2: " tw", 3: "o", 4: " three four", 5: "", 6: ",", 7: "."}


def decode(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens).strip()


ALL_SPEECH = np.ones(2000, dtype=bool)


def test_tokens_become_words() -> None:
    spans = [(0, 1), (3, 4), (6, 8), (9, 10)]
    words = word_timestamps(
        [1, 2, 3, 4], spans, decode, frame_seconds=0.08, speech=ALL_SPEECH, offset=10.0
    )
    assert [word.text for word in words] == ["one", "two", "three", "four"]
    # Without pauses a word begins a frame before the centre of its first one, and then ends the
    # word before.
    assert (words[0].start, words[0].end) == pytest.approx((10.0, 10.16))
    assert (words[1].start, words[1].end) == pytest.approx((10.16, 10.64))
    # The two words of a token share its time by their lengths.
    whole = words[3].end - words[2].start
    assert words[2].start == pytest.approx(10.64)
    assert words[2].end == words[3].start == pytest.approx(words[2].start + 5 / 9 * whole)
    # The last one does not go on for ever.
    assert words[3].end == pytest.approx(10.0 + 9.5 * 0.08 + 0.6)


@pytest.mark.parametrize("scale", [1, 2])
def test_pauses_tell_when_words_begin_and_end(scale) -> None:
    """Also where frames are half as long: tokens come as late, in seconds."""
    frame, ends = 0.08 / scale, scale - 1
    spans = [(scale * first, scale * last + ends) for first, last in ((5, 6), (15, 16), (20, 21))]
    speech = np.zeros(250, dtype=bool)
    speech[22:60] = speech[95:200] = True
    words = word_timestamps([1, 1, 1], spans, decode, frame_seconds=frame, speech=speech)
    first, second, third = ((word.start, word.end) for word in words)
    assert first == pytest.approx((0.22, 0.60))
    # Both words behind a pause came 0.18 and 0.25 s after they began: so did the third.
    assert second == pytest.approx((0.95, 1.6 - 0.215))
    assert third == pytest.approx((1.6 - 0.215, 2.0))
    # A closure is no pause.
    speech[50:58] = False
    (word,) = word_timestamps([1], spans[:1], decode, frame_seconds=frame, speech=speech)
    assert word.end == 0.6


@pytest.mark.parametrize("seed", range(20))
def test_words_are_in_order_and_have_a_duration(seed) -> None:
    draw = np.random.default_rng(seed)
    cuts = np.sort(draw.choice(60, size=12, replace=False))
    spans = [(int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    speech = np.repeat(draw.random(100) < 0.6, 7)
    words = word_timestamps([1] * 6, spans, decode, frame_seconds=0.08, speech=speech)
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[0] >= 0
    assert all(word.start < word.end for word in words)


def test_marks_which_are_recognised_in_the_pause_after_a_word_do_not_lengthen_it() -> None:
    speech = np.zeros(400, dtype=bool)
    speech[20:60] = speech[200:260] = True
    options = {"frame_seconds": 0.08, "speech": speech}
    plain = word_timestamps([1, 2, 3], [(3, 4), (26, 27), (28, 29)], decode, **options)
    spans = [(3, 4), (24, 25), (26, 27), (28, 29), (45, 46)]
    marked = word_timestamps([1, 6, 2, 3, 7], spans, decode, **options)
    assert [word.text for word in marked] == ["one,", "two."]
    assert [(w.start, w.end) for w in marked] == [(w.start, w.end) for w in plain]
    assert marked[0].end <= 0.7


def test_tokens_without_text_belong_to_the_word_before() -> None:
    spans = [(0, 1), (2, 3), (4, 5)]
    words = word_timestamps([5, 1, 5], spans, decode, frame_seconds=1.0, speech=ALL_SPEECH)
    assert words == [Word("one", 1.0, 5.1)]
    for tokens in ([5], []):
        result = word_timestamps(
            tokens, spans[: len(tokens)], decode, frame_seconds=1.0, speech=ALL_SPEECH
        )
        assert result == []


def test_characters_are_the_words_of_languages_without_spaces() -> None:
    words = word_timestamps(
        [7, 8], [(0, 1), (2, 4)], lambda t: "".join({7: "你好", 8: "吗"}[x] for x in t),
        frame_seconds=0.1, speech=ALL_SPEECH, spaces=False,
    )  # fmt: skip
    assert [word.text for word in words] == ["你", "好", "吗"]


def spoken(*words: tuple[str, float, float], name: str = "a b.wav") -> Transcription:
    timed = tuple(Word(*word) for word in words)
    text = " ".join(word.text for word in timed)
    return Transcription(name, 90.0, text, (Segment(0.0, 90.0, text, words=timed),))


def test_formats() -> None:
    item = spoken(("<a>", 0.0, 0.5), ("b", 3661.25, 3662.0))
    assert srt(item) == (
        "1\n00:00:00,000 --> 00:00:00,500\n<a>\n\n2\n01:01:01,250 --> 01:01:02,000\nb\n"
    )
    assert vtt(item).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n&lt;a&gt;\n")
    assert ctm(item) == "a_b 1 0.000 0.500 <a>\na_b 1 3661.250 0.750 b\n"
    # Players drop a cue that lasts no time.
    assert "00:00:01,000 --> 00:00:01,001" in srt(spoken(("a", 1.0, 1.0)))


def test_without_words_segments_are_shown() -> None:
    plain = Transcription("x.wav", 4.0, "a b", (Segment(0.0, 2.0, "a b"), Segment(2.0, 4.0, "")))
    assert cues(plain) == [Cue(0.0, 2.0, ("a b",), estimated=True)]
    assert ctm(plain) == "x 1 0.000 1.000 a\nx 1 1.000 1.000 b\n"


def test_a_name_that_is_too_long_for_a_file_counts_as_missing(tmp_path) -> None:
    there, long = Source("a", "a", "a.wav"), Source("n" * 300, "n" * 300, "n.wav")
    (tmp_path / "a.txt").touch()
    assert ResultWriter("text", tmp_path, [there, long]).missing([there, long]) == [long]


@pytest.mark.parametrize(("style", "whole"), [("srt", srt), ("vtt", vtt), ("ctm", ctm)])
def test_a_file_that_grows_is_whole_after_each_segment(style, whole) -> None:
    # What is said with times, without, not at all, and with more than a line has.
    timed = tuple(Word(f"w{i}", i * 0.7, i * 0.7 + 0.5) for i in range(12))
    segments = (
        Segment(0.0, 9.0, " ".join(word.text for word in timed), words=timed),
        Segment(9.0, 10.0, ""),
        Segment(10.0, 11.0, "two\n\n1 --> 2\nlines"),
        Segment(12.0, 13.0, "< &", words=None),
    )
    item = Transcription("stream", 13.0, " ".join(item.text for item in segments), segments)
    file = GrowingFile(style, "stream")
    text = file.header
    for count, segment in enumerate(item.segments, 1):
        text += file.add(segment)
        so_far = whole(Transcription(item.id, 0.0, "", item.segments[:count]))
        # A blank line says at once that the last cue is complete.
        assert text == so_far + ("" if style == "ctm" else "\n")
        if style != "ctm":
            blocks = text.removesuffix("\n\n").split("\n\n")
            first = ["WEBVTT"] if style == "vtt" else []
            assert blocks[: len(first)] == first
            visible = cues(Transcription(item.id, 0.0, "", item.segments[:count]))
            assert len(blocks) == len(first) + len(visible)
    if style == "srt":
        numbers = [int(block.split("\n")[0]) for block in text.removesuffix("\n\n").split("\n\n")]
        assert numbers == list(range(1, 5))
    assert GrowingFile(style, "stream").header == whole(Transcription("", 0.0, "", ())) + (
        "\n" if style == "vtt" else ""
    )


def files(*names: str) -> list[Source]:
    return find(names)


def test_each_recording_has_its_file(tmp_path, capsys) -> None:
    sink = ResultWriter("srt", tmp_path / "out", files("a b.wav", "c.flac"))
    sink.write(spoken(("one", 0.0, 1.0)))
    sink.write(Failure("c.flac", "damaged"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a b.srt"]
    assert capsys.readouterr().out == ""
    text = ResultWriter("text", tmp_path / "out", files("a b.wav"))
    text.write(spoken(("one", 0.0, 1.0)))
    assert (tmp_path / "out" / "a b.txt").read_text() == "one\n"


def test_what_would_be_mixed_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="`--format srt` takes one recording, but there are 2"):
        ResultWriter("srt", None, files("a.wav", "b.wav"))
    with pytest.raises(ValueError, match=r"x/a\.wav and of y/a\.wav would be 'a\.wav'"):
        ResultWriter("srt", tmp_path, files("x/a.wav", "y/a.wav"))
