import bench_planning
import pytest


@pytest.mark.extended
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--utterances", "3000", "--frame-budgets", "4000", "--world-sizes", "2", "8"]
    bench_planning.main(options)
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header.count("|") == rule.count("|") == 13
    assert [row.count("|") for row in rows] == [13, 13]
    assert [row.split(" | ")[2] for row in rows] == ["2", "8"]


def test_what_is_measured() -> None:
    result = bench_planning.measure(3000, 4000, 4)
    assert result.steps > 10
    assert result.cpu_seconds > 0
    assert 1e7 < result.peak_bytes < 1e11
    assert max(result.padding_frames, result.padding_tokens) < 0.005
    assert 0 <= result.imbalance[0] <= result.imbalance[1] <= result.imbalance[2] < 0.02
