"""The padding that the project promises, on a real list of durations and on made-up ones."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import padding_study
import pytest

from effasr.planning.study import LADDER, StudyOptions

LENGTHS = Path(__file__).parents[2] / "profiling" / "lengths" / "librispeech_dev_clean.txt"
SVG = "{http://www.w3.org/2000/svg}"


def enlarged(folder: Path, count: int) -> Path:
    """A corpus of any size with the distribution of the committed quantiles, and texts."""
    quantiles = np.loadtxt(LENGTHS)
    generator = np.random.default_rng(count)
    seconds = np.interp(generator.uniform(0, len(quantiles) - 1, count), range(400), quantiles)
    return written(folder / f"dev_clean_{count}.tsv", seconds, generator)


def written(path: Path, seconds: np.ndarray, generator: np.random.Generator) -> Path:
    tokens = np.maximum(1, seconds * generator.normal(3.6, 0.7, len(seconds))).astype(int)
    rows = (f"{s:.3f}\t{n}\n" for s, n in zip(seconds.tolist(), tokens.tolist(), strict=True))
    path.write_text("duration_seconds\tn_tokens\n" + "".join(rows))
    return path


def synthetic(folder: Path, name: str) -> Path:
    generator = np.random.default_rng(3)
    seconds = {
        "short words and long talks": np.where(
            generator.random(20_000) < 0.7,
            generator.uniform(0.3, 2.0, 20_000),
            generator.uniform(15.0, 40.0, 20_000),
        ),
        "cut at 30 s": np.minimum(30.0, generator.lognormal(2.3, 0.8, 12_000)),
        "all of 10 s": np.full(6_000, 10.0),
    }[name]
    return written(folder / "synthetic.tsv", seconds, generator)


def figures(path: Path, budget: int) -> dict[str, dict]:
    options = StudyOptions(world_size=8)
    rows = padding_study.study([path], options, budgets=[budget], recipe=None)
    assert [row.strategy for row in rows] == list(LADDER)
    return {row.strategy: row.figures for row in rows}


@pytest.mark.parametrize("count", [3_000, 20_000])
@pytest.mark.parametrize("budget", [8_000, 24_000])
@pytest.mark.representative(count=3_000, budget=8_000)
@pytest.mark.representative(count=20_000, budget=24_000)
def test_read_speech(tmp_path, count, budget) -> None:
    found = figures(enlarged(tmp_path, count), budget)
    packed, random = found["packed"], found["random"]
    assert packed["padding_frames"] <= 0.005
    assert packed["padding_tokens"] <= 0.005
    assert packed["padding_flops"] <= 0.005
    assert packed["rank_imbalance_p99"] <= 0.005
    assert random["padding_frames"] > 0.6
    # The same audio costs random batches nearly three times as much.
    assert random["flops_per_audio_hour"] > 2.5 * packed["flops_per_audio_hour"]


@pytest.mark.parametrize("name", ["short words and long talks", "cut at 30 s", "all of 10 s"])
def test_other_distributions(tmp_path, name) -> None:
    packed = figures(synthetic(tmp_path, name), 8_000)["packed"]
    assert packed["padding_frames"] <= 0.005
    assert packed["padding_tokens"] <= 0.005
    assert packed["rank_imbalance_p99"] <= 0.005


def test_random_batches_of_16(tmp_path) -> None:
    """As in the notes on packing, 61 % of the frames are padding."""
    options = StudyOptions(world_size=1, batch_size=16)
    (row, *_) = padding_study.study(
        [enlarged(tmp_path, 3_000)], options, budgets=[8_000], recipe=None
    )
    assert row.strategy == "random"
    assert 0.58 < row.figures["padding_frames"] < 0.64


def test_table_csv_and_picture(tmp_path, capsys) -> None:
    path = enlarged(tmp_path, 3_000)
    twice = f"{path}+{LENGTHS}"
    run = tmp_path / "run"
    run.mkdir()
    lines = [
        {"step": 10, "padding_frames": 0.1, "padding_tokens": 0.2, "rank_imbalance": 0.0},
        {"step": 30, "padding_frames": 0.4, "padding_tokens": 0.5, "rank_imbalance": 0.3},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = (tmp_path / "p.csv", tmp_path / "p.svg")
    options = ["--budgets", "2000", "--world-size", "2", "--csv", str(made[0])]
    padding_study.main([str(path), twice, str(run), *options, "--picture", str(made[1])])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + 5 + 5 + 1
    assert shown[-1].startswith("| run |  | measured | 30.0 | 40.0 |  |  | 20.0 |")
    with made[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == [*LADDER, *LADDER, "measured"]
    assert rows[5]["lengths"] == f"{path.stem}+{LENGTHS.stem}"
    assert int(rows[5]["utterances"]) == 3_400
    assert float(rows[-1]["padding_tokens"]) == pytest.approx(0.4)
    texts = [text.text for text in ElementTree.parse(made[1]).iter(f"{SVG}text")]
    assert texts.count(f"{path.stem}, 2,000 frames a batch") == 1
    assert texts.count("packed") == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no step"),
        ("{", r"metrics\.jsonl:1: not a line of metrics"),
        ('{"step": 3}', r"metrics\.jsonl:1: not a line of metrics"),
    ],
)
def test_a_run_without_figures(tmp_path, content, message) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        padding_study.measured(tmp_path)
