"""Subtitles have cues that can be read: their size, where they end, and their times."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effasr.transcription.outputs.cues import Cue, CueLayout, cues, graphemes, text_width
from effasr.transcription.outputs.subtitles import GrowingFile, srt, vtt
from effasr.transcription.results import Segment, Transcription
from effasr.transcription.word_timestamps import Word

# What a recognizer wrote of 25 s of speech without a pause.
TALK = (
    "turn on the heater in the garden and show me the weather in berlin on monday and play a story "
    "in the office and turn on the light in the kitchen six eight five nine six eight five eight "
    "four six seven one zero three turn off the heater in the garden and wait three minutes six "
    "four nine five zero one two zero four eight move the red box to the corner play the news"
)


def of(*segments: Segment) -> Transcription:
    text = " ".join(segment.text for segment in segments)
    return Transcription("x", max(item.end for item in segments), text, segments)


def evenly(text: str, each: float = 0.4, pauses: dict[int, float] | None = None) -> Segment:
    """Words of equal length; ``pauses`` are the seconds after some of them."""
    at, words = 0.0, []
    for number, word in enumerate(text.split()):
        words.append(Word(word, at, at + each))
        at += each + (pauses or {}).get(number, 0.0)
    return Segment(0.0, at, text, words=tuple(words))


def texts(result: list[Cue]) -> list[str]:
    return [" ".join(cue.lines) for cue in result]


def check(result: list[Cue], layout: CueLayout, end: float) -> None:
    times = [time for cue in result for time in (cue.start, cue.end)]
    assert times == sorted(times)
    assert not times or (times[0] >= 0 and times[-1] <= end)
    for cue in result:
        assert 0.001 <= round(cue.end - cue.start, 6) <= layout.cue_seconds
        assert 1 <= len(cue.lines) <= layout.lines
        assert all(text_width(line) <= layout.line_width for line in cue.lines)


@pytest.mark.parametrize("timed", [True, False])
def test_a_long_segment_has_many_cues(timed) -> None:
    segment = evenly(TALK, 25 / len(TALK.split())) if timed else Segment(0.0, 25.0, TALK)
    result = cues(of(segment))
    check(result, CueLayout(), 25.0)
    assert " ".join(texts(result)) == TALK
    assert len(result) <= 6
    assert all(cue.estimated is not timed for cue in result)
    # In proportion to the text, as far as nothing else is known.
    for cue, text in zip(result, texts(result), strict=True):
        assert cue.end - cue.start == pytest.approx(25 * len(text) / len(TALK), rel=0.2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"line_width": 9}, "`line_width` must be at least 10, but is 9."),
        ({"lines": 0}, "`lines` must be at least 1, but is 0."),
        ({"cue_seconds": 0.5}, "`cue_seconds` must be at least 1, but is 0.5."),
    ],
)
def test_error_messages(sizes, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CueLayout(**sizes)


def test_cues_end_at_pauses_and_punctuation() -> None:
    assert texts(cues(of(evenly("a b c", pauses={1: 1.5})))) == ["a b", "c"]
    sentences = (
        "We will meet in the office at nine in the morning. After that, I will take the train to "
        "the next town. Bring a coat."
    )
    assert texts(cues(of(evenly(sentences, 0.2)))) == re.split(r"(?<=morning\.) ", sentences)
    # A short pause is as good as the end of a sentence.
    paused = evenly(TALK, 0.3, {6: 0.4, 15: 0.4, 22: 0.4, 30: 0.4})
    ends = [text.split()[-1] for text in texts(cues(of(paused)))]
    assert ends[:2] == ["monday", "kitchen"]
    clauses = (
        "the first of these clauses is a long one, and the second of them is as long as the first"
    )
    assert texts(cues(of(evenly(clauses, 0.2))))[0].endswith("one,")


def test_scripts_without_spaces_break_between_characters() -> None:
    words = tuple(Word("字", n * 0.05, n * 0.05 + 0.05) for n in range(100))
    result = cues(of(Segment(0.0, 5.0, "字" * 100, words=words)))
    check(result, CueLayout(), 5.0)
    assert sum(len("".join(cue.lines)) for cue in result) == 100
    # Full-width letters count 2: at most 21 fill a line.
    assert max(len(line) for cue in result for line in cue.lines) <= 21
    # No line begins with closing punctuation or a small kana, or ends with an opening bracket.
    text = "彼は「明日、東京へ行って、友達に会う。」と言った。" * 6
    for segment in (Segment(0.0, 30.0, text), Segment(0.0, 30.0, text, words=letters(text))):
        result = cues(of(segment))
        check(result, CueLayout(), 30.0)
        lines = [line for cue in result for line in cue.lines]
        assert "".join(lines) == text
        assert not any(line[0] in "」、。っ" or line[-1] == "「" for line in lines)
    thai = "สวัสดีครับผมชื่อสมชายวันนี้อากาศดีมาก" * 3
    lines = [line for cue in cues(of(Segment(0.0, 20.0, thai))) for line in cue.lines]
    assert "".join(lines) == thai
    assert all(graphemes(line)[0] == line[0] or not line[0].isalpha() for line in lines)
    assert [part for line in lines for part in graphemes(line)] == graphemes(thai)


def letters(text: str) -> tuple[Word, ...]:
    each = 30.0 / len(text)
    return tuple(Word(letter, n * each, (n + 1) * each) for n, letter in enumerate(text))


def test_cues_have_the_spaces_of_the_text() -> None:
    words = tuple(Word(letter, n * 0.3, n * 0.3 + 0.3) for n, letter in enumerate("你好okab界"))
    segment = Segment(0.0, 3.0, "你好ok ab 界", words=words)
    (cue,) = cues(of(segment))
    assert cue == Cue(0.0, 2.1, ("你好ok ab 界",))
    assert GrowingFile("srt", "stream").add(segment).splitlines()[2] == "你好ok ab 界"
    # Words of another text are separated by spaces.
    assert texts(cues(of(Segment(0.0, 3.0, "x", words=words[:2])))) == ["你 好"]


def test_graphemes_and_widths() -> None:
    flag, family = "\U0001f1e9\U0001f1ea", "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert graphemes(f"e\u0301{flag}{flag}{family}ก้") == ["e\u0301", flag, flag, family, "ก้"]
    assert list(map(text_width, ("ab", "字", "\uff46", "e\u0301", "ก้", "ｶ"))) == [2, 2, 2, 1, 1, 1]


def test_cues_never_overlap_and_end_with_the_audio() -> None:
    # Words of a segment may go on in the next one, and the last frame beyond the audio.
    first = Segment(0.0, 1.0, "a", words=(Word("a", 0.2, 1.4),))
    second = Segment(1.0, 1.0004, "b c", words=(Word("b", 1.0, 1.0), Word("c", 1.0, 1.0004)))
    result = cues(of(first, second))
    assert [(cue.start, cue.end) for cue in result] == [(0.2, 1.4), (1.4, 1.401)]
    check(cues(of(Segment(0.0, 0.05, TALK))), CueLayout(), 0.05)
    # Nobody reads for 25 s that somebody has said hello.
    assert [cue.end for cue in cues(of(Segment(0.0, 25.0, "hello")))] == [7.0]


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\u200d"), min_size=1, max_size=60)


@given(
    st.lists(st.tuples(st.lists(WORDS, max_size=8), st.floats(0.5, 30)), max_size=4),
    st.booleans(),
    st.tuples(st.integers(10, 60), st.integers(1, 3), st.floats(1.0, 9.0)),
)
def test_cues_of_any_text_keep_their_limits(content, timed, size) -> None:
    segments, at, layout = [], 0.0, CueLayout(*size)
    for words, length in content:
        each = length / max(1, len(words))
        spoken = tuple(Word(w, at + n * each, at + (n + 1) * each) for n, w in enumerate(words))
        text = " ".join(words)
        segments.append(Segment(at, at + length, text, words=spoken if timed else None))
        at += length
    item = Transcription("x", at, "", tuple(segments))
    check(cues(item, layout), layout, at + 1e-9)
    grown = "".join(map(GrowingFile("srt", "x", layout).add, segments))
    assert grown == srt(item, layout) + "\n" * bool(grown)
    file = GrowingFile("vtt", "x", layout)
    assert file.header + "".join(map(file.add, segments)) == vtt(item, layout) + "\n"
