"""The benchmark of operations against another revision of their code."""

from __future__ import annotations

import csv
import subprocess
import tempfile
from pathlib import Path

import bench_ops
import pytest
from bench import revisions, rows
from bench.provenance import fingerprint, revision
from hypothesis import given
from hypothesis import strategies as st

ROOT = bench_ops.ROOT
IS_CHECKOUT = (ROOT / ".git").exists()


@pytest.mark.skipif(not IS_CHECKOUT, reason="the sources are not in a git checkout")
@pytest.mark.extended
def test_head_as_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "ops.csv"
    options = ["--device", "cpu", "--op", "depthwise_conv", "--frames", "40"]
    assert bench_ops.main([*options, "--base", "HEAD", "--output", str(output)]) == 0
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout[:12]
    found = list(rows.read(output))
    before, now = found[: len(found) // 2], found[len(found) // 2 :]
    assert {row["git"] for row in before} == {head}
    assert {row["git"].removesuffix("-dirty") for row in now} == {head}
    assert [row["shape"] for row in before] == [row["shape"] for row in now]
    shown = capsys.readouterr().out.splitlines()
    lines = [line.split() for line in shown if "reference" in line]
    assert len(lines) == len(now) == 4
    for line, old, new in zip(lines, before, now, strict=True):
        at = line.index(new["mode"])
        assert float(line[at + 1]) == float(old["p50_ms"])
        assert float(line[at + 2]) == float(new["p50_ms"])
        ratio = float(old["p50_ms"]) / float(new["p50_ms"])
        assert float(line[at + 3]) == pytest.approx(ratio, abs=1e-3)
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert "effasr_base_" not in listed.stdout


def test_a_base_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench_ops.main(["--device", "cpu", "--base", "no-such-revision"]) == 2
    assert "`--base` must name a revision" in capsys.readouterr().err
    with (
        pytest.raises(ValueError, match=r"`--base` must name a revision .* is '--all'"),
        revisions.checkout(ROOT, "--all"),
    ):
        pass


def test_what_only_one_has_is_named() -> None:
    row = {"op": "a", "kind": "", "backend": "triton", "mode": "forward", "shape": "T=1"}
    fast, slow = row | {"p50_ms": "1"}, row | {"p50_ms": "3"}
    other, more = fast | {"op": "b"}, fast | {"op": "c"}
    shown = revisions.side_by_side([slow, other], [fast, more])
    assert "3.000   T=1" in shown
    assert "only here: c  triton forward T=1" in shown
    assert "only in the base: b  triton forward T=1" in shown


TEXT = st.text(st.sampled_from("=+-@\t\r\n'\",;1e. A\u202e"), max_size=6)


@given(names=st.lists(TEXT, min_size=1, max_size=4), number=st.floats(-1e9, 1e9))
def test_a_text_in_a_table_is_no_formula_and_is_read_as_it_was(names, number: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        for name in names:
            rows.append(path, ["name", "value"], {"name": name, "value": number})
        with path.open(newline="", encoding="utf-8") as file:
            _, *cells = csv.reader(file)
        assert len(cells) == len(names)
        for first, second in cells:
            assert second == str(number)
            if first.startswith(("=", "+", "-", "@", "\t", "\r")):
                float(first)  # a number, such as -1
        found = list(rows.read(path))
        assert [row["name"] for row in found] == [name.replace("\r", " ") for name in names]
        rows.write(path, ["name", "value"], found)
        assert list(rows.read(path)) == found


def test_a_row_after_one_that_was_cut_off_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    rows.append(path, ["name", "value"], {"name": "a", "value": 1})
    with path.open("a") as file:
        file.write("b")
    rows.append(path, ["name", "value"], {"name": "c", "value": 3})
    assert path.read_text() == "name,value\na,1\nb\nc,3\n"


def test_a_copy_without_git_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "effasr").mkdir()
    source = tmp_path / "effasr" / "a.py"
    source.write_text("1\n")
    first = fingerprint(tmp_path)
    assert len(first) == 12
    assert revision(tmp_path) == f"sources-{first}"
    (tmp_path / "effasr" / "notes.txt").write_text("2\n")
    assert fingerprint(tmp_path) == first
    source.write_text("2\n")
    assert fingerprint(tmp_path) != first
