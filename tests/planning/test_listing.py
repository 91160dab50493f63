"""Lengths from everything that has some, what is kept of them, and errors for other lines."""

import gzip
import json
import os
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import soundfile

from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig
from effasr.data.filters.rules import Limits
from effasr.data.index.corpus import Corpus
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.data.tokenizer import train_tokenizer
from effasr.planning.listing import read_listing, select
from effasr.planning.report import Panel, draw
from effasr.planning.study import PlanRequest

LIMITS = Limits(ctc=False)


@pytest.fixture
def write(tmp_path):
    def file(name, *lines):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        return path

    return file


def read(*paths, **options):
    return read_listing(paths, limits=LIMITS, **options)


def test_json_lines_with_tokens_or_text(write):
    path = write(
        "m.jsonl",
        {"duration": 1.5, "num_tokens": 7, "id": "first"},
        {"duration": 2, "text": "einundzwanzig"},
        "",
        {"duration": 3.25, "text": "你好", "audio_filepath": "nowhere.wav"},
    )
    result = read(path, prompt_tokens=4)
    assert result.columns.seconds.tolist() == [1.5, 2.0, 3.25]
    assert result.columns.text.tolist() == [7, 5, 2]
    assert result.columns.prompt.tolist() == [4, 4, 4]
    assert (result.by_text, result.by_duration) == (2, 0)
    assert [result.columns.identify(i)[0] for i in range(3)] == ["first", f"{path}:2", f"{path}:4"]


def test_tables_and_mere_durations(write):
    tabs = write("a.tsv", "duration_seconds\tn_tokens_bpe5000\tid", "2.5\t9\tx", "10.0\t\ty")
    quoted = write("q.tsv", "duration\ttext", '3\tsaid "yes')
    assert read(quoted).columns.seconds.tolist() == [3.0]
    commas = write("b.csv", 'num_tokens,duration,"some, text"', '3,1.25,"a, b"')
    mere = write("c.txt", "# seconds", "4.0", "", "5  # and more")
    result = read(tabs, commas, mere)
    assert result.columns.seconds.tolist() == [2.5, 10.0, 1.25, 4.0, 5.0]
    assert result.columns.text.tolist() == [9, 36, 3, 14, 18]
    assert (result.by_text, result.by_duration) == (0, 3)
    assert [result.columns.identify(i)[0] for i in (0, 1, 4)] == ["x", "y", f"{mere}:4"]


def test_gzipped_lhotse_cuts(tmp_path):
    cut = {
        "id": "c", "duration": 2.0, "type": "MonoCut", "custom": {"pnc": False},
        "supervisions": [{"text": "abcdef", "language": "de"}],
    }  # fmt: skip
    path = tmp_path / "cuts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(cut) + "\n")
    result = read(path)
    assert (result.columns.text.tolist(), result.columns.seconds.tolist()) == ([2], [2.0])
    # A folder that `effasr prepare` wrote is that file.
    assert read(tmp_path).columns.text.tolist() == [2]


def test_audio_is_opened_only_for_lines_without_a_duration(tmp_path, write):
    soundfile.write(tmp_path / "a.wav", np.zeros(8000, np.float32), 16_000)
    path = write(
        "m.jsonl",
        {"audio_filepath": "a.wav", "text": "abc"},
        {"audio_filepath": "gone.wav", "text": "abc", "duration": 1.0},
        {"audio_filepath": "gone.wav", "text": "abc"},
    )
    result = read(path)
    assert result.columns.seconds.tolist() == [0.5, 1.0]
    assert [(drop.id, drop.reason) for _, drop in result.dropped] == [("gone", "missing_audio")]
    folder = tmp_path / "folder"
    folder.mkdir()
    soundfile.write(folder / "b.wav", np.zeros(16_000, np.float32), 16_000)
    (folder / "b.txt").write_text("abcdef")
    result = read(folder)
    assert (result.columns.seconds.tolist(), result.columns.text.tolist()) == ([1.0], [2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ({"num_tokens": 3}, "`duration` is missing"),
        ({"duration": None, "text": "a"}, "`duration` is missing"),
        ({"duration": -1, "text": "a"}, "`duration` must be greater than 0, but is -1"),
        ({"duration": 0, "text": "a"}, "`duration` must be greater than 0, but is 0"),
        ('{"duration": NaN, "text": "a"}', "`duration` must be a number of seconds, but is nan"),
        ('{"duration": Infinity, "text": "a"}', "`duration` must be a number of seconds, but is"),
        ({"duration": 10**400, "text": "a"}, "`duration` must be a number of seconds, but is 100"),
        (f'{{"duration": {"1" * 5000}}}', "no JSON that Python reads"),
        ("[" * 100_000, "no JSON that Python reads"),
        ({"duration": "a", "text": "a"}, "`duration` must be a number of seconds, but is 'a'"),
        ({"duration": True, "text": "a"}, "`duration` must be a number of seconds, but is True"),
        ({"duration": 1}, "`text` and `num_tokens` are missing: every line needs one of them"),
        ({"duration": 1, "text": 3}, "`text` must be a string, but is 3"),
        ({"duration": 1, "num_tokens": -1}, "`num_tokens` must be an integer from 0 on"),
        ({"duration": 1, "num_tokens": 2.5}, "`num_tokens` must be an integer from 0 on"),
        ({"duration": 1, "num_tokens": False}, "`num_tokens` must be an integer from 0 on"),
        ({"duration": 1, "supervisions": []}, "a cut must have one supervision, but has 0"),
        ({"duration": 1, "supervisions": [7]}, "a supervision must be an object"),
        ({"duration": 1, "supervisions": [{}, {}]}, "a cut must have one supervision, but has 2"),
    ],
)
def test_a_malformed_line_is_named(write, line, message):
    path = write("m.jsonl", {"duration": 1, "num_tokens": 1}, line)
    with pytest.raises(ValueError, match=rf"m\.jsonl:2: .*{re.escape(message)}"):
        read(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["words", "1"], "t:1: must be a JSON object, a number of seconds, or a header"),
        (["duration", "-1"], "t:2: `duration` must be greater than 0, but is -1"),
        (["duration", "nan"], "t:2: `duration` must be a number of seconds"),
        (["duration", "inf"], "t:2: `duration` must be a number of seconds"),
        (["duration", "x"], "t:2: `duration` must be a number of seconds"),
        (["duration,id", "1"], "t:2: must have 2 columns, as the header has, but has 1"),
        (["duration,id", f"1,{'x' * 200_000}"], "t:2: not a line of a table (field larger than"),
        (["duration,num_tokens", "1,-2"], "t:2: `num_tokens` must be an integer from 0 on"),
        (["duration,num_tokens", "1,²"], "t:2: `num_tokens` must be an integer from 0 on"),
        (["1.5", "", "0"], "t:3: `duration` must be greater than 0"),
        (["1.5", "two"], "t:2: `duration` must be a number of seconds"),
    ],
)
def test_a_malformed_row_is_named(write, lines, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(write("t", *lines))


def test_no_such_file_and_no_text(tmp_path):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        read(tmp_path / "gone.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="must be a regular file, but is a pipe"):
        read(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe1")
    with pytest.raises(ValueError, match="must be UTF-8"):
        read(tmp_path / "bytes")


def test_with_a_tokenizer_it_is_what_training_plans(tmp_path, write):
    """The same lengths, shape and reasons as those of a corpus that is trained on."""
    words = ["one", "two", "three", "four"]
    tokenizer = train_tokenizer({"en": words * 20}, tmp_path / "t", vocab_size=20)
    rows = []
    for number in range(30):
        seconds = 0.3 + 0.07 * number
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(int(16e3 * seconds)), 16_000)
        text = " ".join(words[: 1 + number % 4])
        rows.append({"audio_filepath": f"{number}.wav", "text": text, "duration": seconds})
    rows[3]["text"] = ""
    rows[5]["lang"] = "fr"
    rows[6]["text"] = "жц"
    rows[7]["text"] = "four three two one " * 3
    path = write("m.jsonl", *rows)
    config = DataConfig(frame_budget=100, min_duration=0.4, max_duration=2.0)
    corpus = Corpus.load([path], tokenizer, config, transducer=True)
    listing = read_listing([path], limits=config.limits(), tokenizer=tokenizer)
    chosen = select(listing, config.limits(), config, transducer=True)
    assert chosen.lengths.frames.tolist() == corpus.lengths.frames.tolist()
    assert chosen.lengths.tokens.tolist() == corpus.lengths.tokens.tolist()
    assert chosen.shape == corpus.shape
    assert chosen.shape.node_budget is not None
    mine = {drop.id.split(":")[-1]: drop.reason for drop in chosen.dropped}
    assert mine == {str(int(drop.id) + 1): drop.reason for drop in corpus.dropped}
    assert set(mine.values()) == {
        "too_short", "too_long", "empty_text", "unknown_language", "unknown_text",
        "ctc_infeasible",
    }  # fmt: skip
    assert listing.by_text == 0


TRANSLATION = {"text": "one two three four " * 6, "source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize(
    ("changed", "options", "reasons"),
    [
        (TRANSLATION, {}, set()),
        (
            {"text": "one two three four"},
            {"filters": FilterConfig(rate_deviations=4)},
            {"token_rate_outlier"},
        ),
        ({"text": ""}, {"text": "optional"}, set()),
        ({"text": ""}, {"text": "optional", "label_tokens_per_second": 9.0}, set()),
        (TRANSLATION | {"text": ""}, {"text": "optional"}, {"empty_text"}),
    ],
)
def test_one_line_in_a_hundred_counts_as_in_training(tmp_path, write, changed, options, reasons):
    words = ["one", "two", "three", "four"] * 20
    tokenizer = train_tokenizer({"en": words, "de": words}, tmp_path / "t", vocab_size=20)
    soundfile.write(tmp_path / "a.wav", np.zeros(64_000), 16_000)
    row = {"audio_filepath": "a.wav", "text": "one", "duration": 4.0}
    path = write("m.jsonl", *({"id": f"u{n}"} | row for n in range(99)), row | changed)
    config = DataConfig(frame_budget=100, **options)
    corpus = Corpus.load([path], tokenizer, config)
    request = PlanRequest([path], "model", CANARY_180M_FLASH, tokenizer, config, config.limits(), 0)
    _, chosen = request.read()
    assert chosen.lengths.frames.tolist() == corpus.lengths.frames.tolist()
    assert chosen.lengths.tokens.tolist() == corpus.lengths.tokens.tolist()
    assert chosen.shape == corpus.shape
    assert {drop.reason for drop in chosen.dropped} == reasons
    assert {drop.reason for drop in corpus.dropped} == reasons


@pytest.fixture
def chosen(write):
    """Choose from rows of seconds and tokens, or of NeMo's fields, with a prompt of 5 tokens."""

    def choose(rows, limits: dict | None = None, rate_deviations=None, **fields):
        config = DataConfig(filters=FilterConfig(rate_deviations=rate_deviations), **fields)
        lines = [
            {"id": f"u{number}", **row}
            if isinstance(row, dict)
            else {"id": f"u{number}", "duration": row[0], "num_tokens": row[1]}
            for number, row in enumerate(rows)
        ]
        applied = replace(config.limits(), **limits or {})
        return select(read_listing([write("list", *lines)], limits=applied), applied, config)

    return choose


def test_every_reason_is_counted_and_listed(chosen):
    seconds = [0.05, 41.0, 2.0, 39.0, 9.0, 7.0, 2.0, 2.0, 3.0]
    result = chosen(
        zip(seconds, [1, 1, 0, 1, 1, 50, 60, 20, 3], strict=True),
        {"max_frames": 100, "max_positions": 60, "max_tokens_per_second": 8.0},
        frame_budget=400,
        token_budget=50,
    )
    assert [(drop.id, str(drop.reason)) for drop in result.dropped] == [
        ("u0", "too_short"),
        ("u1", "too_long"),
        ("u2", "empty_text"),
        ("u3", "over_frame_budget"),
        ("u4", "over_model_length"),
        ("u5", "over_token_budget"),
        ("u6", "over_model_length"),
        ("u7", "token_rate_outlier"),
    ]
    assert len(result) == 1
    assert (result.lengths.frames.tolist(), result.lengths.tokens.tolist()) == ([38], [8])
    assert result.reasons["over_model_length"] == 2
    details = {drop.id: drop.details for drop in result.dropped}
    assert details["u0"] == "0.050 s, under `min_duration` 0.1 s"
    assert details["u3"] == "488 encoder frames, over `frame_budget` 400"
    assert details["u5"] == "55 tokens, over 50"
    assert json.dumps(result.dropped[1].duration) == "41.0"


def test_rate_outliers_are_those_among_texts_of_their_language(chosen):
    counts, languages = [*[10] * 199, 40, *[40] * 200], ["en"] * 200 + ["de"] * 200
    rows = [
        {"duration": 4.0, "num_tokens": count, "lang": language}
        for count, language in zip(counts, languages, strict=True)
    ]
    result = chosen(rows, frame_budget=100, rate_deviations=4)
    assert [(drop.id, drop.reason) for drop in result.dropped] == [("u199", "token_rate_outlier")]
    assert result.dropped[0].details == "10.0 per second, far more than others of 4.0 s"


SVG = "{http://www.w3.org/2000/svg}"


def widths(picture, kind):
    rects = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [float(rect.attrib["width"]) for rect in rects if rect.attrib["class"] == kind]


def test_lengths_of_bars():
    panels = [
        Panel("share", [0.25, 1.0], ["75", "0"], [0.75, 0.0]),
        Panel("seconds", [3.0, 1.5], ["3.0", "1.5"]),
    ]
    picture = draw(["a", "b"], panels, title="t")
    full = max(widths(picture, "filled"))
    assert widths(picture, "filled") == [full / 4, full, full, full / 2]
    assert widths(picture, "rest") == [full * 3 / 4, 0, 0, 0]


def test_everything_is_inside_and_names_are_escaped():
    panels = [Panel("<p>", [1.0, 0.0], ["&", '"'])] * 3
    picture = draw(["<script>", "b"], panels, title='"t" & <u>', legend=("x", "y"))
    root = ElementTree.fromstring(picture)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"<script>", "<p>", '"t" & <u>', "&", "x", "y"} <= set(texts)
    assert root.attrib["aria-label"] == '"t" & <u>'
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    assert "prefers-color-scheme: dark" in picture
