"""``effasr report``: the page of a run, of a model directory and of a corpus."""

import json
import re
import shutil
import time

import numpy as np
import pytest
import soundfile

from effasr.cli.main import main
from effasr.evaluation.result import Evaluation, ScoredUtterance, save
from effasr.evaluation.wer import count_errors
from tests.support.corpora import write_lines, write_tone
from tests.support.page import Page

HOSTILE = '<script>alert("x")</script></td><img src=x onerror=y>'
HEBREW = "שלום עולם \u202e"


def report(*arguments):
    assert main(["report", *map(str, arguments)]) == 0
    return Page(arguments[1])


def audio_of(page):
    return [values["src"] for tag, values in page.tags if tag == "audio"]


@pytest.fixture(scope="module")
def run(workplace, tmp_path_factory):
    """A run with an evaluated set."""
    folder = tmp_path_factory.mktemp("report") / "first"
    shutil.copytree(workplace.run, folder)
    assert main(["evaluate", str(folder), str(workplace.folder / "dev")]) == 0
    return folder


def test_the_page_of_a_run_has_curves_sets_utterances_and_what_differs(run, tmp_path):
    page = report(run, tmp_path / "page.html")
    titles = ["", "Curves", "Sets", "Worst-utterances", "Examples-over-time"]
    assert list(page.sections) == [*titles, "Warnings-and-data", "Configuration"]
    assert {"Loss", "Learning rate", "Norm of the gradient", "Padding"} <= set(
        re.findall("<figcaption>(.*?)</figcaption>", page.html)
    )
    assert "effasr evaluate" in page.sections["Sets"]
    result = json.loads((run / "evaluation/dev/wer.json").read_text())
    assert f"{100 * result['wer_interval'][0]:.2f} to" in page.sections["Sets"]
    assert "model.encoder.width16" in page.sections["Configuration"]
    assert "data.prefetch" not in page.sections["Configuration"]
    sources = audio_of(page)
    assert sources
    assert all(source.startswith("data:audio/flac;base64,") for source in sources)
    curves = [values["points"].split() for tag, values in page.tags if tag == "polyline"]
    assert len(curves[0]) == 4  # a point for each step


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["metrics.jsonl"], "No lines in metrics.jsonl"),
        (["validation.jsonl", "evaluation"], "No evaluated set"),
        (["config.yaml"], "No configuration"),
        (["evaluation/dev/hypotheses.jsonl"], ""),
        (["metrics.jsonl", "validation.jsonl", "config.yaml"], "No configuration"),
    ],
)
def test_a_page_says_what_a_run_lacks(run, tmp_path, removed, message):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    for name in removed:
        path = broken / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (broken / "metrics.jsonl").exists():  # as it is being written
        with (broken / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "lo')
    assert message in report(broken, tmp_path / "page.html").sections.get("Not-there", "")


def test_errors_by_speaker_and_word(tmp_path):
    texts = [("ann", "a b", "a c"), ("ann", "b", ""), ("bob", "b d", "x b d")]
    rows = [
        {"id": f"u{n}", "audio_filepath": str(write_tone(tmp_path / f"{n}.wav", 0.5)),
         "speaker": speaker, "text": reference}
        for n, (speaker, reference, _) in enumerate(texts)
    ]  # fmt: skip
    scored = [
        ScoredUtterance(f"u{n}", "en", *pair, 0.5, count_errors(*pair))
        for n, (_, *pair) in enumerate(texts)
    ]
    evaluation, path = Evaluation("none", tuple(scored)), tmp_path / "run" / "evaluation" / "dev"
    save(evaluation, path, model="x", manifest=str(write_lines(tmp_path / "m.jsonl", rows)))
    page = report(tmp_path / "run", tmp_path / "page.html")
    cells = re.sub("<[^>]+>", "|", page.html.partition("Worst utterances</h2>")[2])
    cells = re.sub(r"\|+", "|", cells)
    assert "|ann|2|3|2|66.67|bob|1|2|1|50.00|" in cells
    assert "|b|3|2|0|c| 1, nothing 1|x|0|0|1|-|" in cells


def test_texts_of_others_stay_texts_and_thousands_are_no_more_than_the_worst(tmp_path):
    texts = [(HOSTILE, HEBREW), (HEBREW, "a"), *(("a b", "a c") for _ in range(5000))]
    utterances = [
        ScoredUtterance(f"<i>{n}</i>", "he", *pair, 1.0, count_errors(*pair))
        for n, pair in enumerate(texts)
    ]
    run = tmp_path / "model"
    save(Evaluation("none", tuple(utterances)), run / "evaluation" / "<b>set", model="x")
    begin = time.process_time()
    page = report(run, tmp_path / "page.html")
    assert time.process_time() - begin < 20
    assert len(page.html) < 100_000
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "i"})
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    worst = page.sections["Worst-utterances"]
    assert '<script>alert("x")</script></td><img' in worst
    assert "\\u202e" in worst
    assert "\u202e" not in page.html
    assert "שלום" in worst
    assert ("bdi", {"dir": "auto"}) in page.tags
    assert "10 utterances" in page.sections["Not-there"]


def test_audio_over_the_limit_is_a_link(tmp_path):
    random = np.random.default_rng(0)  # noise does not compress
    names = [f"long {n}.wav" for n in range(8)]
    for name in names:
        soundfile.write(tmp_path / name, random.uniform(-1, 1, 50 * 16_000), 16_000)
    write_lines(
        tmp_path / "m.jsonl",
        [{"audio_filepath": name, "duration": 50.0, "text": name} for name in names],
    )
    (tmp_path / "pages").mkdir()
    page = report(tmp_path / "m.jsonl", tmp_path / "pages" / "page.html")
    assert len(page.html) < 9_000_000
    links = {source for source in audio_of(page) if not source.startswith("data:")}
    assert "../long%207.wav#t=0,50" in links


def test_the_page_of_a_corpus_counts_what_is_wrong_with_it(tmp_path):
    rows = [
        {"audio_filepath": f"{n}.wav", "duration": 1 + n / 10, "text": "one two", "speaker": "ann"}
        for n in range(8)
    ]
    for n, row in enumerate(rows):
        write_tone(tmp_path / row["audio_filepath"], row["duration"], rate=8_000 if n else 16_000)
    clipped = np.ones(16_000) * np.sign(np.sin(np.arange(16_000) / 20))
    soundfile.write(tmp_path / "clipped.wav", clipped, 16_000)
    shutil.copy(tmp_path / "1.wav", tmp_path / "copy.wav")
    rows += [
        {"audio_filepath": "clipped.wav", "duration": 1.0, "text": f"{HOSTILE} ß"},
        {"audio_filepath": "copy.wav", "duration": 1.1, "text": HEBREW, "lang": "he"},
        {"audio_filepath": "missing.wav", "duration": 1.0, "text": "x"},
    ]
    write_lines(tmp_path / "m.jsonl", rows)
    page = report(tmp_path / "m.jsonl", tmp_path / "page.html")
    assert "1 cannot be opened" in page.sections[""]
    assert "8000 Hz, channels: 18" in page.sections["Languages,-speakers,-formats"]
    assert "latin small letter sharp s" in page.sections["Characters"]
    assert "full scale in a row: 1, such as clipped" in page.sections["Silence-and-clipping"]
    duplicates = page.sections["Duplicates"]
    assert "7 utterances repeat the text of another" in duplicates
    assert "1 files are copies of another" in duplicates
    assert "data.min_duration=1.0" in page.sections["Filters"]
    assert "img" not in {tag for tag, _ in page.tags}
    folder = tmp_path / "prepared"
    assert main(["prepare", str(tmp_path / "m.jsonl"), str(folder), "--report"]) == 0
    assert "missing_audio" in Page(folder / "report.html").sections["Filters"]
