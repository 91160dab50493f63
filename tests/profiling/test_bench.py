"""The benchmarks' command and harness; each subcommand writes rows at its smallest size."""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bench
import pytest
import torch
from benchmarks import harness, inference, training
from benchmarks.speech import agreement
from benchmarks.workload import read_durations
from hypothesis import example, given
from hypothesis import strategies as st

PROFILING = Path(__file__).parents[2] / "profiling"
RESULTS = PROFILING / "results"
CPU = torch.device("cpu")
TINY = inference.SIZES["tiny"]


def rows_of(command: str, path: Path, status: int = 0) -> list[dict[str, str]]:
    assert bench.main([*command.split(), "--output", str(path)]) == status
    return list(harness.read(path))


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("training", training.COLUMNS),
        ("inference", inference.COLUMNS),
    ],
)
def test_columns_are_those_of_the_results(name: str, columns: Sequence[str]) -> None:
    assert harness.header(RESULTS / f"{name}.csv") == list(columns)


# --- the harness ----------------------------------------------------------------------------------


def test_rows_go_to_files_of_the_same_columns_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.csv"
    assert list(harness.read(path)) == []
    harness.append(path, ["a", "b"], {"a": 1, "b": 2})
    harness.append(path, ["a", "b"], {"a": 3, "b": 4})
    assert path.read_text() == "a,b\n1,2\n3,4\n"
    with pytest.raises(ValueError, match=r"differs in c: name another file"):
        harness.append(path, ["a", "b", "c"], {})
    with pytest.raises(ValueError, match="differs in their order"):
        harness.append(path, ["b", "a"], {})
    # A full disk has cut the last row.
    path.write_text("a,b\n1")
    harness.append(path, ["a", "b"], {"a": 3, "b": 4})
    assert path.read_text() == "a,b\n1\n3,4\n"


TEXT = st.text(st.sampled_from("=+-@\t\r\n'\",;1e. A\u202e"), max_size=6)


@given(names=st.lists(TEXT, min_size=1, max_size=4), number=st.floats(-1e9, 1e9))
@example(names=["'=a"], number=1.0)
def test_a_text_in_a_table_is_no_formula_and_is_read_as_it_was(names, number: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        for name in names:
            harness.append(path, ["name", "value"], {"name": name, "value": number})
        with path.open(newline="", encoding="utf-8") as file:
            _, *cells = csv.reader(file)
        assert len(cells) == len(names)
        for first, second in cells:
            assert second == str(number)
            if first.startswith(("=", "+", "-", "@", "\t", "\r")):
                float(first)  # a number, such as -1
        rows = list(harness.read(path))
        assert [row["name"] for row in rows] == [name.replace("\r", " ") for name in names]


def test_a_copy_without_git_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "effasr").mkdir()
    source = tmp_path / "effasr" / "a.py"
    source.write_text("1\n")
    first = harness.fingerprint(tmp_path)
    assert len(first) == 12
    assert harness.revision(tmp_path) == f"sources-{first}"
    (tmp_path / "effasr" / "notes.txt").write_text("2\n")
    assert harness.fingerprint(tmp_path) == first
    source.write_text("2\n")
    assert harness.fingerprint(tmp_path) != first


def test_a_clock_for_a_cpu() -> None:
    calls = []
    timing = harness.measure(lambda: calls.append(0), CPU, repeats=7, warmup=2, seconds=5)
    assert len(calls) == 9
    assert timing.p20 <= timing.p50 <= timing.p80
    assert timing.peak_bytes is None
    assert harness.percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert harness.percentiles([0.0, 10.0, 5.0]) == (2.0, 5.0, 8.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"duration": 1.5, "text": "x"}\n\n{"duration": 2}\n'),
        ("a.tsv", "duration_seconds\tid\n1.5\ta\n2\tb\n"),
        ("a.txt", "# seconds\n1.5\n2\n"),
    ],
)
def test_reads_lengths(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_durations(tmp_path / name) == [1.5, 2.0]


@pytest.mark.extended
def test_a_bare_machine_is_enough() -> None:
    """Without what reads audio and manifests, the model can be timed, and recorded."""
    code = """
absent = {"lhotse", "soundfile", "soxr", "jiwer", "nvtx", "tensorboard"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import report
from benchmarks import inference, kernels, ops, training
from benchmarks.speech import Corpus, plan_of
corpus = Corpus.of(30, 100, 8.0)
for system in ("packed_static", "packed", "random"):
    assert plan_of(system, corpus, corpus.shape(200))
assert not absent & set(sys.modules)
"""
    folder = str(PROFILING)
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r})\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_encoder_has_rows(tmp_path: Path) -> None:
    rows = rows_of("encoder --tiny", tmp_path / "encoder.csv")
    assert {("effasr", "eager")} <= {(row["system"], row["mode"]) for row in rows}
    for row in rows:
        speed = 2000 / float(row["step_ms"])
        assert float(row["audio_s_per_s"]) == pytest.approx(speed, rel=0.01)


# --- inference ------------------------------------------------------------------------------------


def test_rows_of_every_shape(tmp_path: Path) -> None:
    command = "inference --size tiny --shapes 3/1 1/3 --batch 3 --repeats 2"
    rows = rows_of(command, tmp_path / "rows.csv")
    assert [row["shape"] for row in rows] == ["3/1", "1/3"]
    for row in rows:
        parts = [float(row[name]) for name in ("encoder_s", "prefill_s", "decode_s", "host_s")]
        assert all(part > 0 for part in parts)
        speed = float(row["audio_s"]) / float(row["p50_s"])
        assert float(row["rtfx"]) == pytest.approx(speed, rel=0.05)


def test_every_utterance_gets_as_many_tokens_as_it_should() -> None:
    model = inference.build("2/2", TINY, CPU, torch.float32)
    speech = inference.utterances(4, CPU, 5.0)
    clock = harness.PartClock(CPU)
    ours = inference.Ours(model, speech, clock)
    tokens = ours.transcribe()
    assert [len(text) for text in tokens] == speech.limits
    assert len(set(speech.limits)) > 1
    clock.take()
    (turn,) = harness.in_turns([lambda number: ours.transcribe()], 1, CPU)
    parts = clock.take()
    assert set(parts) == {"encode", "decode.admit", "decode.step"}
    assert 0 < sum(parts.values()) < turn.seconds
    row = inference.row_of([(turn.seconds, parts)], speech, has_parts=True)
    columns = ("encoder_s", "prefill_s", "decode_s", "host_s")
    assert sum(row[name] for name in columns) == pytest.approx(turn.seconds, abs=1e-4)
    assert ours.transcribe() == tokens


def test_transformers_writes_the_same() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    model = inference.build("2/2", TINY, CPU, torch.float32)
    speech = inference.utterances(3, CPU, 4.0)
    theirs = inference.Peer(model, speech).transcribe()
    assert [len(tokens) for tokens in theirs] == speech.limits
    ours = inference.Ours(model, speech, harness.PartClock(CPU))
    assert agreement(ours.transcribe(), theirs) > 0.8


def test_a_disagreement_stops_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = argparse.Namespace(transcribe=lambda: [[-5]] * 2)
    monkeypatch.setattr(inference, "Peer", lambda model, speech: wrong)
    command = "inference --size tiny --shapes 1/1 --batch 2 --peer"
    assert rows_of(command, tmp_path / "rows.csv", 1) == []
    assert "only 0.0000 of the tokens agree" in capsys.readouterr().err
