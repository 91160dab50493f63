import json
import math

import pytest
import torch

from effasr.training.checkpointing import run_checkpoints
from effasr.training.checkpointing.resume import check_same_run
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run

SAVED = {
    "name": "a",
    "seed": 0,
    "model": {"encoder": {"layers": 2, "width": 8}, "decoder": None},
    "data": {"manifest": "m", "workers": 2},
    "optimizer": {"lr": 0.1},
}


def test_the_same_configuration_goes_on_without_a_word():
    assert check_same_run(SAVED, {**SAVED}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "`seed` must stay 0, .* but is 1"),
        ({"data": {"manifest": "n", "workers": 2}}, "`data.manifest` must stay 'm'"),
        (
            {"model": {"encoder": {"layers": 3, "width": 8}, "decoder": None}},
            "`model.encoder.layers` must stay 2, .* but is 3.*training.restart=true",
        ),
        (
            {"model": {"encoder": {"layers": 2, "width": 8}, "decoder": {"layers": 1}}},
            "`model.decoder` must stay None",
        ),
        ({"data": {"manifest": "m", "workers": 2, "new": 1}}, "`data.new` must stay None"),
    ],
)
def test_another_model_or_another_order_of_data_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_same_run(SAVED, SAVED | change)


def test_other_changes_are_obeyed_and_reported():
    now = SAVED | {"optimizer": {"lr": 0.2}, "data": {"manifest": "m", "workers": 8}}
    assert check_same_run(SAVED, now) == ["data.workers: 2 -> 8", "optimizer.lr: 0.1 -> 0.2"]


def test_bad_audio_may_be_left_out_from_here_on_but_parameters_not_be_renumbered():
    saved = {"data": {"on_bad_audio": "raise"}, "optimizer": {"exempt": ["biases"]}}
    change = {"data": {"on_bad_audio": "skip"}}
    assert check_same_run(saved, saved | change) == ["data.on_bad_audio: 'raise' -> 'skip'"]
    for change in ({"exempt": ["norms"]}, {"exempt": ["biases"], "name": "lamb"}):
        with pytest.raises(ValueError, match=rf"`optimizer\.{[*change][-1]}` must stay"):
            check_same_run(saved, saved | {"optimizer": change})


def test_a_checkpoint_from_before_a_field_existed_goes_on(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 2})) == 0
    path = tmp_path / "run" / "checkpoints" / "step_00000002"
    state = torch.load(path / "training.pt", weights_only=True)
    saved = state["config"]
    del saved["data"]["filters"], saved["data"]["epoch_end"], saved["model"]["text_encoder"]
    del saved["model"]["encoder"]["conv_norm"], saved["training"]["async_save"]
    torch.save(state, path / "training.pt")
    (path / "manifest.json").unlink()
    sums = run_checkpoints._checksums(path, 0)
    (path / "manifest.json").write_text(json.dumps({"step": 2, "files": sums}))
    assert run(make_config(training={"max_steps": 3})) == 0
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [1, 2, 3]
    with pytest.raises(ValueError, match=r"`data\.epoch_end` must stay None"):
        run(make_config(training={"max_steps": 4}, data={"epoch_end": "exact"}))


def test_the_training_state_has_the_layout_of_earlier_checkpoints(make_config, tmp_path):
    """Components by name; how far the run has come, and what it is, are at the top."""
    assert run(make_config(training={"max_steps": 1})) == 0
    path = tmp_path / "run" / "checkpoints" / "step_00000001" / "training.pt"
    state = torch.load(path, weights_only=True)
    assert state.keys() == {
        "step", "best", "is_best", "must_validate", "config", "corpus", "epoch", "position",
        "ranks", "plan", "optimizer", "objective", "meter", "blend", "adascale", "diagnostics",
        "files", "finite_step", "division", "validation", "validations_since_best",
    }  # fmt: skip
    assert (state["step"], state["epoch"], state["position"]) == (1, 0, [0, 1])
    assert (state["best"], state["is_best"], state["must_validate"]) == (math.inf, False, False)
    assert state["ranks"] == 1
    assert state["adascale"] is None
    assert state["meter"].keys() == {"sums", "skipped", "oom_splits"}
    assert state["optimizer"].keys() == {"param_groups", "state"}
    assert state["objective"].keys() == {"average", "on"}
