"""Checkpoints of which each rank writes its part."""

import shutil

import pytest
import torch

from effasr.checkpoint import load_model
from effasr.distributed.tensor_files import read_whole
from tests.support.run_ranks import train_on_ranks


@pytest.mark.slow
def test_a_sharded_run_goes_on_to_the_last_bit(make_config, tmp_path):
    loop = {"strategy": "fsdp2", "threads": 1, "max_steps": 8}
    newest = tmp_path / "run" / "checkpoints" / "step_00000008"
    ends = []
    for _ in range(2):
        train_on_ranks(make_config(training=loop))
        ends.append(load_model(newest).model.state_dict() | read_whole(newest / "training"))
        parts = [file.stat().st_size for file in (newest / "training").glob("*.distcp")]
        # As if the run had been killed after the checkpoint before.
        shutil.rmtree(newest)
    assert len(parts) == 2
    assert max(parts) < 0.7 * sum(parts)
    assert ends[0].keys() == ends[1].keys()
    assert any(name.startswith("trained/") for name in ends[0])
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
