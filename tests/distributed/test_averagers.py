from pathlib import Path

import pytest

from effasr.distributed.delayed_averaging import DelayedConfig
from effasr.distributed.local_sgd import HierarchicalConfig


def test_ranks_average_when_and_with_whom_they_should(run_ranks) -> None:
    """All scenarios in the same four processes, which take long to begin."""
    script = Path(__file__).parent / "averager_workers.py"
    for result in run_ranks("everything", size=4, script=script):
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({}, "`periods` must be steps, at least 1 each, but is {}"),
        ({0: None}, "`periods` must be steps, at least 1 each"),
        ({2: 8}, "`periods` must have null, all ranks, at its longest"),
        ({2: 8, 4: 4, 8: None}, "groups of at least 2 ranks that grow with the period"),
        ({2: None, 8: None}, "groups of at least 2 ranks that grow with the period"),
        ({2: 1, 8: None}, "groups of at least 2 ranks that grow with the period"),
    ],
)
def test_levels_must_lead_to_all_ranks(periods, message) -> None:
    with pytest.raises(ValueError, match=message):
        HierarchicalConfig(periods=periods)


def test_a_negative_warmup_is_refused() -> None:
    for config in (HierarchicalConfig, DelayedConfig):
        with pytest.raises(ValueError, match="`warmup_steps` must be at least 0, but is -1"):
            config(warmup_steps=-1)
