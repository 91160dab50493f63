"""Runs with diagnostics: what they warn of, what they write, and that they change nothing."""

import json

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import load_model, resolve
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import DiagnosticsConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run

EAGER = DiagnosticsConfig(ctc_epochs=1, ctc_steps=0, validations=2)


@pytest.fixture(scope="module")
def noise(tones, tmp_path_factory):
    """The texts of the tones, to audio that has nothing to do with them."""
    folder = tmp_path_factory.mktemp("noise")
    draw = np.random.default_rng(0)
    for name in ("train", "test"):
        lines = [json.loads(line) for line in (tones / f"{name}.jsonl").read_text().splitlines()]
        for line in lines:
            audio = 0.1 * draw.normal(size=round(line["duration"] * 16_000))
            soundfile.write(folder / line["audio_filepath"], audio.astype(np.float32), 16_000)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_a_run_on_audio_without_speech_warns(make_config, noise, tmp_path, capsys):
    config = make_config(
        data={"train": str(noise / "train.jsonl"), "validation": str(noise / "test.jsonl")},
        training={
            "max_steps": 24, "log_every": 4, "validate_every": 8, "ema_decay": None,
            "diagnostics": EAGER, "tensorboard": True,
        },
        optimizer=OptimizerConfig(lr=3e-3),
    )  # fmt: skip
    assert run(config) == 0
    folder = tmp_path / "run"
    warned = read_lines(folder / "warnings.jsonl")
    assert {"ctc_plateau", "ignores_audio", "stuck_error_rate"} <= {x["warning"] for x in warned}
    assert len({(x["warning"], x["step"]) for x in warned}) == len(warned)
    begun = [x["warning"] for x in warned if x["active"]]
    assert begun.count("ctc_plateau") == begun.count("ignores_audio") == 1
    assert all(x["cause"] and x["remedy"] for x in warned if x["active"])
    visible = capsys.readouterr().err
    joined = " ".join(visible.split())
    for x in warned:
        assert x["title"] in joined
        assert not x["active"] or (x["cause"] in joined and x["remedy"] in joined)
    warnings = visible[visible.index("warning: ") :].splitlines()
    assert max(len(line) for line in warnings if "RTFx" not in line) <= 100
    metrics = read_lines(folder / "metrics.jsonl")
    begins = next(x["step"] for x in warned if x["warning"] == "ctc_plateau")
    assert [line["warning_ctc_plateau"] for line in metrics] == [
        line["step"] >= begins for line in metrics
    ]
    assert metrics[-1]["ctc_of_no_audio"] > 0.9
    (first, *_, last) = read_lines(folder / "validation.jsonl")
    assert [x["id"] for x in first["examples"]] == [x["id"] for x in last["examples"]]
    assert len(last["examples"]) == 2
    assert last["examples"][0]["reference"] in visible
    # The probe reads all six, and the validation loss is a mean per token.
    assert last["cross_entropy"] == pytest.approx(metrics[-1]["cross_entropy"], rel=0.3)
    assert last["cross_entropy_other_audio"] - last["cross_entropy"] == pytest.approx(
        last["audio_gain"]
    )
    assert abs(last["audio_gain"]) < 0.05 * last["cross_entropy"]
    assert 0 <= last["ctc_blank_share"] <= 1
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.extended
def test_diagnostics_change_nothing(make_config, tones, tmp_path):
    loop = {"validate_every": 3, "max_steps": 12, "log_every": 2}
    for name, settings in (("with", EAGER), ("without", None)):
        training = loop | {"diagnostics": settings}
        data = {"validation": str(tones / "test.jsonl")}
        assert run(make_config(name=name, data=data, training=training)) == 0
    warned, silent = (read_lines(tmp_path / x / "warnings.jsonl") for x in ("with", "without"))
    assert warned
    assert silent == []
    lines, plain = (read_lines(tmp_path / x / "metrics.jsonl") for x in ("with", "without"))
    assert any(line[key] is True for line in lines for key in line if key.startswith("warning_"))
    assert not any(key.startswith("warning_") for line in plain for key in line)
    assert [line["loss"] for line in plain] == [line["loss"] for line in lines]
    assert "audio_gain" not in read_lines(tmp_path / "without" / "validation.jsonl")[0]
    first, other = (
        load_model(resolve(tmp_path / name)).model.state_dict() for name in ("with", "without")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
