import pytest

from tests.faults.chaos import chaos


@pytest.mark.extended
@pytest.mark.slow
def test_a_run_whose_processes_are_killed_ends_as_if_nothing_had_happened(tmp_path) -> None:
    outcome = chaos(tmp_path, seconds=12.0, steps=40, seed=1)
    assert outcome.faults == []
    assert sum(outcome.kills.values()) >= 1
    # Each kill costs one attempt, and nothing else does.
    assert outcome.attempts <= sum(outcome.kills.values()) + 1
