"""Benchmarks operations at another revision of the kernels, with the same harness and inputs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench import rows

Row = Mapping[str, str]


@contextmanager
def checkout(root: Path, reference: str) -> Iterator[tuple[Path, str]]:
    """Yield a temporary worktree of another revision, and its commit.

    Raises:
        ValueError: There is no such revision, or no repository.
    """
    try:
        commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{reference}^{{commit}}")
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise ValueError(
            f"`--base` must name a revision of the repository in {root}, but is {reference!r}: "
            f"{said}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="effasr_base_") as folder:
        path = Path(folder) / commit[:12]
        _git(root, "worktree", "add", "--detach", str(path), commit)
        try:
            yield path, commit
        finally:
            _git(root, "worktree", "remove", "--force", str(path))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(root: Path, command: Sequence[str], output: Path) -> list[Row]:
    """Run the benchmark with the kernels of a checkout.

    Args:
        root: Root of the checkout.
        command: Command of the benchmark, without its output.
        output: Output for its rows.

    Raises:
        ValueError: It has no row.
    """
    paths = [str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # What is left out, and why, it says itself.
    measuring = [sys.executable, *command, "--output", str(output)]
    subprocess.run(measuring, env=variables, stdout=subprocess.DEVNULL, check=False)
    found = list(rows.read(output))
    if not found:
        raise ValueError(
            f"nothing was measured with the kernels in {root}: the lines above say why"
        )
    return found


def compare(root: Path, reference: str, command: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the base and of the working tree, measured in one run each.

    Raises:
        ValueError: The revision is not there, or cannot be measured with this harness.
    """
    with checkout(root, reference) as (base, commit), tempfile.TemporaryDirectory() as folder:
        before = measure(base, command, Path(folder) / "base.csv")
        used = {row["git"] for row in before}
        if used != {commit[:12]}:
            raise ValueError(
                f"`--base` {reference} is {commit[:12]}, but kernels of {', '.join(sorted(used))} "
                "were measured: uninstall effasr from this environment, or install it as editable."
            )
        return before, measure(root, command, Path(folder) / "this.csv")


def side_by_side(before: Sequence[Row], now: Sequence[Row]) -> str:
    """Return both medians and their ratio, a line for each row that both have."""
    keys = ("op", "kind", "backend", "mode", "shape")
    base = {tuple(row[key] for key in keys): float(row["p50_ms"]) for row in before}
    lines = ["", f"{'':70} {'base ms':>10} {'this ms':>10} {'base / this':>12}"]
    found: list[str] = []
    for row in now:
        at = tuple(row[key] for key in keys)
        if (old := base.pop(at, None)) is None:
            found.append(f"only here: {' '.join(at)}")
            continue
        op = f"{row['op']} {row['kind']}".strip()
        new = float(row["p50_ms"])
        label = f"{op:28} {row['backend']:14} {row['mode']:18}"
        lines += [f"{label:70} {old:10.4f} {new:10.4f} {old / new:12.3f}   {row['shape']}"]
    found += [f"only in the base: {' '.join(at)}" for at in base]
    return "\n".join([*lines, "base / this over 1: this is faster", *found]) + "\n"
