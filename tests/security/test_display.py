"""What others wrote, on terminals, in subtitles and in model cards."""

import json
import logging
import re
import unicodedata
from contextlib import redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from effasr.cli.main import main
from effasr.cli.options import print_line
from effasr.evaluation import model_card
from effasr.evaluation.result import Evaluation, ScoredUtterance, save
from effasr.evaluation.wer import ErrorCounts
from effasr.training.run_dir.run_log import ProgressDisplay
from effasr.transcription.json_files import json_line, one_line
from effasr.transcription.outputs.cues import text_width
from effasr.transcription.outputs.subtitles import GrowingFile
from effasr.transcription.results import Segment
from effasr.transcription.word_timestamps import Word
from effasr.untrusted.display import TerminalFormatter, escape_controls, escape_line

TEXT = st.text(
    st.one_of(st.characters(), st.sampled_from("\x1b\x9b\x07\r\n\t\u202e\u2066\u2028 -->;&<|`[*#="))
)
# All that may be a control character.
ALL = "".join(map(chr, (*range(0x2100), *range(0xD800, 0xE000))))
TIME = st.floats(0, 1e5)


def is_control(character):
    bidi = unicodedata.bidirectional(character)
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or bidi in (
        *("LRE", "RLE", "LRO", "RLO", "PDF"),
        *("LRI", "RLI", "FSI", "PDI"),
    )


@given(TEXT)
@example(ALL)
def test_no_control_character_is_left(text):
    assert not any(is_control(item) for item in escape_line(text))
    assert not any(is_control(item) for item in escape_controls(text) if item not in "\n\t")
    assert not any(is_control(item) for item in one_line(text))


def test_letters_that_need_joiners_stay():
    text = "क्\u200dष \u0645\u06cc\u200c\u062e é\u00a0ü 日本"
    assert escape_line(text) == text


@given(TEXT)
def test_json_has_the_value_and_no_control_character(text):
    line = json_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert not any(is_control(item) for item in line.removesuffix("\n"))


def test_an_error_of_the_command_line_shows_escapes(tmp_path, capsys, monkeypatch):
    """Also in the file from which torchrun prints the reason in its summary."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    name = tmp_path / "a\x1b[2J\u202eb.jsonl"
    assert main(["prepare", str(name), str(tmp_path / "out")]) == 2
    visible = capsys.readouterr().err
    assert visible.count("\n") == 1
    reason = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    for text in (visible.removesuffix("\n"), reason):
        assert "\\x1b[2J\\u202eb.jsonl" in text
        assert not any(map(is_control, text))


def hostile_log(name):
    error = (ValueError, ValueError(name), None)
    record = logging.LogRecord("a", 30, "a", 1, "read %s", (name,), error)
    return TerminalFormatter("effasr: %(message)s").format(record)


def hostile_display(name):
    stream = StringIO()
    with ProgressDisplay(2, 0, 1, Console(file=stream, width=200)) as display:
        display.show(f"reading {name}")
    return stream.getvalue()


def hostile_line(name):
    with redirect_stdout(StringIO()) as stream:
        print_line(f"{name}: written")
    return stream.getvalue()


def hostile_comparison(name):
    errors = ErrorCounts(words=1, substitutions=1, utterances=1)
    scored = ScoredUtterance("a", "en", "b", "c", 1.0, errors)
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as stream:
        save(Evaluation("basic", (scored,), seconds=1.0), Path(folder) / name / "evaluation" / name)
        assert main(["compare", str(Path(folder) / name)]) == 0
    return stream.getvalue()


def hostile_transcripts(text):
    scored = ScoredUtterance("a", "en", text, text, 1.0, ErrorCounts(words=1, utterances=1))
    with TemporaryDirectory() as folder:
        save(Evaluation("none", (scored,), seconds=1.0), folder)
        files = [Path(folder) / name for name in ("ref.trn", "hyp.trn", "alignments.txt")]
        texts = [path.read_text() for path in files]
    assert all("\\x1b" in text for text in texts)
    return "".join(texts)


SHOWN = [hostile_log, hostile_display, hostile_line, hostile_comparison, hostile_transcripts]


@pytest.mark.parametrize("shown", SHOWN)
def test_what_is_shown_of_a_hostile_name_is_escaped(shown):
    text = shown("run\x1b[2J\x9b\u202e\u2066x")
    assert "run\\x1b[2J\\x9b\\u202e\\u2066x" in text
    assert not any(is_control(item) for item in text if item != "\n")


def segments(texts, *, timed):
    result = []
    for text, begin, length in texts:
        words = tuple(Word(item, begin, begin + length) for item in text.split(" "))
        result.append(Segment(begin, begin + length, text, words=words if timed else ()))
    return result


SEGMENTS = st.lists(st.tuples(TEXT, TIME, st.floats(0, 60)), max_size=4)
CLOCK = r"\d{2,}:\d\d:\d\d%s\d{3}"


@given(SEGMENTS, st.booleans())
def test_subtitles_have_cues_of_two_lines_whatever_the_text(texts, timed):
    pairs: list[tuple[Literal["srt", "vtt"], str]] = [("srt", ","), ("vtt", r"\.")]
    for style, point in pairs:
        file = GrowingFile(style, "a")
        whole = file.header + "".join(map(file.add, segments(texts, timed=timed)))
        cues = whole.removeprefix("WEBVTT\n\n").removesuffix("\n\n")
        clock = CLOCK % point
        for number, cue in enumerate(filter(None, cues.split("\n\n")), 1):
            head, *lines = cue.split("\n") if style == "vtt" else cue.split("\n")[1:]
            assert style == "vtt" or cue.split("\n")[0] == str(number)
            result = re.fullmatch(f"({clock}) --> ({clock})", head)
            begin, end = result.groups()
            assert (len(begin), begin) < (len(end), end)
            assert 1 <= len(lines) <= 2
            for line in lines:
                assert line.strip()
                assert "-->" not in line
                assert not any(map(is_control, line))
                assert text_width(unescape(line)) <= 42


@given(TEXT, SEGMENTS, st.booleans())
def test_a_line_of_ctm_has_five_fields(name, texts, timed):
    file = GrowingFile("ctm", name)
    for line in "".join(map(file.add, segments(texts, timed=timed))).split("\n")[:-1]:
        assert len(line.split()) == 5
        assert not any(map(is_control, line))
        assert not line.startswith(";;")


def front_and_body(card):
    """Divide a card as huggingface_hub does."""
    result = re.search(r"^(\s*---[\r\n]+)([\S\s]*?)([\r\n]+---(\r\n|\r|\n|$))", card)
    return yaml.safe_load(result[2]), card[result.end() :]


def card_of(name, other, configuration, **fields):
    result = {"utterances": 1, "words": 2, "wer": 0.5, "cer": 0.5, "rtfx": 1.0, "normalizer": other}
    card = model_card.ModelCard(
        name=name, loader="AutoModel", parameters=1, configuration=configuration, license=other,
        has_tokenizer=True, tested=(model_card.TestedSet(other, result),), **fields,
    )  # fmt: skip
    return front_and_body(card.text())


@given(name=TEXT, other=TEXT)
@example(name="a\n---\nlicense: b", other="---")
@example(name="a\u2028b", other="\x85")
@example(name="!!python/name:os.system", other="*a: &b {c: [")
def test_the_front_matter_of_a_model_card_has_the_values_as_text(name, other):
    front, _ = card_of(name, other, "a: 1", languages=(name, other))
    assert front.get("license", "") == other
    assert front["language"] == [name, other]
    (index,) = front["model-index"]
    assert index["name"] == name
    assert index["results"][0]["dataset"]["name"] == other
    assert index["results"][0]["metrics"][0]["name"] == f"WER % (normaliser {other})"


def test_a_model_card_shows_names_as_text():
    name = "<img src=x onerror=alert(1)>\n# [a](javascript:b) `c` |"
    configuration = "a: |\n  ```\n  ````\n  <b>"
    _, body = card_of(name, name, configuration, languages=(name,), data=(name,), author=name)
    body, configuration, last = re.split("`````(?:yaml)?\n", body)
    assert configuration == "a: |\n  ```\n  ````\n  <b>\n"
    body += last
    assert "<img" not in body
    assert "[a](" not in body
    assert "`c`" not in body.replace("\\`c\\`", "")
    assert [line for line in body.split("\n") if line.startswith("# ")] == [
        "# &lt;img src=x onerror=alert(1)&gt;\\\\n# \\[a\\](javascript:b) \\`c\\` |"
    ]
