"""fsdp2 over two processes, with batches that ranks do not have in common."""

import pytest

from tests.training.ranks import run_ranks

WORKERS = "tests.training.sharding_workers"


@pytest.mark.slow
def test_sharded_training_is_that_of_one_process() -> None:
    """All scenarios in the same two processes, which take long to begin."""
    for done in run_ranks(WORKERS, "everything", 200):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "strategies\ntext\nrecomputed\ncompiled\n"
