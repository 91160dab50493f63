"""One of two ranks runs out of memory: the other neither hangs nor learns anything else."""

import pytest

from tests.training.ranks import run_ranks

WORKERS = "tests.training.recovery_workers"


@pytest.mark.slow
def test_the_gradient_is_that_without_a_failure_wherever_it_fails() -> None:
    for done in run_ranks(WORKERS, "recover", 200):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "recovered\n"


def test_what_does_not_fit_at_all_ends_every_rank() -> None:
    first, second = run_ranks(WORKERS, "alone", 60)
    assert first.returncode
    assert second.returncode
    assert "alone does not fit in memory" in second.stdout
    assert "PeerFailed: rank 1: utterance '1-0' alone does not fit" in first.stderr
