from pathlib import Path

SCRIPT = Path(__file__).parent / "gossip_worker.py"


def test_learners_mix_lose_nothing_and_in_step_are_ddp(run_ranks):
    for result in run_ranks("learners_that_live", size=4, script=SCRIPT):
        assert result.returncode == 0, result.stderr
        assert "lost" not in result.stderr


def test_a_killed_learner_leaves_the_others_running(run_ranks):
    first, killed, *others = run_ranks("one_of_four_is_killed", size=4, script=SCRIPT)
    assert killed.returncode == 7
    for learner, result in zip((0, 2, 3), (first, *others), strict=True):
        assert result.returncode == 0, result.stderr
        assert f"learner {learner} went on" in result.stdout
        told = f"learner {learner} lost learner 1, and goes on with learner 3: " in result.stderr
        assert told == (learner != 3), result.stderr
