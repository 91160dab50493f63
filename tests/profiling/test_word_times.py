"""Times of words are compared with those of synthesised speech, by a model that is known to err."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import word_times
from word_times import Spoken, compare, summary

from effasr.data.demo.acoustics import SpokenWords
from effasr.transcription.results import Segment, Transcription
from effasr.transcription.transcribe import Waveform
from effasr.transcription.word_timestamps import Word

ROOT = Path(__file__).parents[2]

# The synthesiser is global to its process. The model says words 50 ms late and ends them 100 ms
# early, and misses a word of the first recording.
SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import word_times
from effasr.transcription.results import Segment, Transcription
from effasr.transcription.word_timestamps import Word

output, made, speak = Path(sys.argv[1]), [], word_times.speak

def noted(recordings):
    made.extend(zip(recordings, speak(recordings)))
    return [spoken for _, spoken in made]

def heard(model, tokenizer, waveforms, *, prompt, config):
    assert config.words
    for number, (waveform, (_, spoken)) in enumerate(zip(waveforms, made, strict=True)):
        assert waveform is spoken.waveform
        words = []
        for true in spoken.words:
            texts = true.text.split()
            times = np.linspace(true.start + 0.05, true.end - 0.1, len(texts) + 1).tolist()
            words += map(Word, texts, times, times[1:])
        if number == 0:
            del words[0]
        yield Transcription(waveform.id, 9.0, "", (Segment(0.0, 9.0, "", words=tuple(words)),))

word_times.load_model = lambda _: SimpleNamespace(model=None, tokenizer=None, prompt=None)
word_times.resolve, word_times.speak, word_times.transcribe = Path, noted, heard
word_times.main(["run", "--sentences", "6", "--output", str(output / "figures.json")])
rows = []
for item, spoken in made:
    loud = np.flatnonzero(np.abs(spoken.waveform.samples) > 0.2 * spoken.waveform.samples.max())
    rows.append({
        "text": item.texts["en"], "lead": item.lead_s, "snr": item.snr_db,
        "onset": loud[0] / spoken.waveform.sample_rate,
        "end": loud[-1] / spoken.waveform.sample_rate,
        "words": [[word.text, word.start, word.end] for word in spoken.words],
    })
(output / "spoken.json").write_text(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[list[dict], dict, str]:
    """What was said, the figures, and what was printed."""
    pytest.importorskip("espeakng_loader")
    folder = tmp_path_factory.mktemp("times")
    path = os.pathsep.join(str(ROOT / x) for x in ("", "kernels", "profiling/studies"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=ROOT, text=True,
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spoken, figures = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("spoken", "figures")
    )
    return spoken, figures, done.stdout


def test_what_is_said_is_known_word_for_word_and_when(measured) -> None:
    spoken, _, _ = measured
    assert len(spoken) == 6
    for row in spoken:
        assert " ".join(text for text, _, _ in row["words"]) == row["text"]
        times = [time for _, start, end in row["words"] for time in (start, end)]
        assert times == sorted(times)
        assert times[0] >= row["lead"]
        # A word may begin softly, and noise may be as loud.
        if row["snr"] > 20:
            assert row["onset"] == pytest.approx(times[0], abs=0.1)
            assert times[-1] - 0.5 < row["end"] < times[-1] + 0.05
    assert any(row["snr"] > 20 for row in spoken)


def test_the_errors_are_those_that_the_model_makes(measured) -> None:
    spoken, figures, printed = measured
    # The first recording was not understood.
    counts = {"digits": 0, "commands": 0}
    digits = {
        "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    }  # fmt: skip
    for row in spoken[1:]:
        texts = [text for text, _, _ in row["words"]]
        counts["digits" if digits.issuperset(texts) else "commands"] += len(texts)
    assert sum(counts.values()) > 10
    assert {name: row["words"] for name, row in figures.items()} == {
        f"{kind} {which}": count
        for kind, count in counts.items()
        for which in ("starts", "ends")
        if count
    }
    for name, row in figures.items():
        size, sign, share = (50.0, 1, 1.0) if name.endswith("starts") else (100.0, -1, 0.0)
        requested = {"mean": size, "bias": sign * size, "p95": size, "within_80_ms": share}
        assert {key: row[key] for key in requested} == pytest.approx(requested)
    assert printed.count("mean |error| 50 ms  median error +50 ms") == len(figures) // 2
    assert printed.count("0.0 % within 80 ms") == len(figures)  # 100.0 % of the starts.


def test_a_model_that_understands_nothing_is_told_to_learn(tmp_path, monkeypatch) -> None:
    message = Spoken(Waveform("a", np.zeros(1), 16_000), (SpokenWords("left", 1.0, 2.0),))
    received = Transcription(
        "a", 3.0, "", (Segment(0.0, 3.0, "", words=(Word("lift", 1.0, 2.0),)),)
    )
    monkeypatch.setattr(word_times, "resolve", Path)
    monkeypatch.setattr(word_times, "load_model", MagicMock())
    monkeypatch.setattr(word_times, "speak", lambda recordings: [message])
    monkeypatch.setattr(word_times, "transcribe", lambda *_, **__: [received])
    with pytest.raises(SystemExit, match="No transcript has the words that were said: train"):
        word_times.main(["run", "--sentences", "1", "--output", str(tmp_path / "figures.json")])
    assert not list(tmp_path.iterdir())


def test_errors_are_described_in_milliseconds() -> None:
    figures = summary([-0.01] * 12 + [0.02] * 6 + [0.1] * 2)
    assert figures == {"words": 20, "mean": 22.0, "bias": -10.0, "p95": 100.0, "within_80_ms": 0.9}


def test_words_that_were_said_as_one_have_a_start_and_an_end_together() -> None:
    message = (SpokenWords("on the", 1.0, 1.5), SpokenWords("left", 2.0, 2.5))
    received = (Word("on", 1.1, 1.2), Word("the", 1.2, 1.4), Word("left", 2.0, 2.75))
    spoken = [Spoken(Waveform(name, np.zeros(1), 16_000), message) for name in ("a", "b")]
    results = [
        Transcription("a", 3.0, "", (Segment(0.0, 3.0, "", words=received),)),
        # Whose words have no times.
        Transcription("b", 3.0, "", (Segment(0.0, 3.0, "on the left", words=None),)),
    ]
    rows = compare(spoken, results)
    assert [row[0] for row in rows] == [False, False]
    assert np.array(rows)[:, 1:] == pytest.approx(np.array([(0.1, -0.1), (0.0, 0.25)]))
