import csv
from pathlib import Path

import bench_loading
import pytest


def test_every_kind_of_storage_is_loaded_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.csv"
    options = ["--hours", "0.01", "--frame-budget", "450", "--workers", "0", "1"]
    assert bench_loading.main([*options, "--consume", "1e6", "--output", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["storage"], row["workers"]) for row in rows] == [
        (storage, workers) for storage in ("wav", "flac", "shar") for workers in "01"
    ]
    for row in rows:
        assert int(row["utterances"]) > 0
        assert float(row["audio_s_per_s"]) > float(row["utterances_per_s"]) > 0
        assert float(row["mb_per_s"]) > 0
        assert 0 <= float(row["wait"]) <= 1
    # Two bytes a sample: what is read cannot be more.
    assert float(rows[0]["mb_per_s"]) == pytest.approx(
        float(rows[0]["audio_s_per_s"]) * 32_000 / 1e6, rel=0.01
    )
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_a_slow_training_waits_for_nothing(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    options = ["--hours", "0.01", "--frame-budget", "450", "--workers", "1", "--storage", "wav"]
    assert bench_loading.main([*options, "--consume", "100", "--output", str(out)]) == 0
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["wait"]) < 0.3


def test_an_unknown_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`storage` must be one of wav, flac, shar, but is 'mp3'"):
        bench_loading.write_corpus(tmp_path, 0.01, "mp3")


def test_every_way_to_change_audio_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_loading, "_NOISES", 2)
    out = tmp_path / "rows.csv"
    options = ["--hours", "0.01", "--frame-budget", "450", "--workers", "0", "--storage", "wav"]
    changes = ["--augment", *bench_loading.AUGMENTS, "--repeats", "2", "--consume", "1e6"]
    assert bench_loading.main([*options, *changes, "--output", str(out)]) == 0
    with out.open(newline="") as file:
        rows = {row["augment"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == bench_loading.AUGMENTS
    # Every utterance is there three times, but for what the first step took.
    assert int(rows["speeds"]["utterances"]) > 2 * int(rows["none"]["utterances"])
    assert int(rows["noise"]["utterances"]) <= int(rows["speeds"]["utterances"])
