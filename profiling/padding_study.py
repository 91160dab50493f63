"""Measures the padding of batches for each batching method: a table, CSV and a picture.

    python profiling/padding_study.py LIST ... [--budgets 8000 24000] [--csv FILE] [--picture FILE]

A list is what `effasr plan --manifest` takes: a manifest, a table with ``duration_seconds``, or
durations alone; ``A+B`` is one corpus of two lists. A finished run, runs/NAME, gives the padding
that it measured. All strategies but packed are computed padded, every utterance at the length of
the longest of its micro-batch, and hold what fills the same frame budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import rows as csv_rows

from effasr.data.atomic_files import write_atomically
from effasr.planning.picture import Panel, draw
from effasr.planning.request import Request
from effasr.planning.study import LADDER, StudyOptions, compare
from effasr.planning.text import percent

MEASURED = "measured"
"""Stands for a strategy: the measurements of a run."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        lengths: Name of the list, or of the run.
        strategy: Batching method.
        figures: Figures by the field names of `effasr.data.sampling.report.PlanReport`, and the
            budgets.
    """

    lengths: str
    strategy: str
    figures: dict[str, Any]

    def cell(self, name: str, form: str = "") -> str:
        """Return a figure as text, empty where there is none."""
        value = self.figures.get(name)
        if value is None:
            return ""
        return percent(value) if form == "%" else format(value, form)


def study(
    paths: Sequence[Path], options: StudyOptions, *, budgets: Iterable[int], recipe: str | None
) -> list[Row]:
    """Compare all strategies on one corpus at several frame budgets."""
    name = "+".join(path.stem for path in paths)
    rows = []
    for budget in budgets:
        request = Request.of(recipe, manifests=paths, frame_budget=budget)
        _, selection = request.read()
        setting = {
            "utterances": len(selection),
            "hours": round(float(selection.seconds.sum()) / 3600, 2),
            "dropped": len(selection.dropped),
            "world_size": options.world_size,
            "frame_budget": budget,
            "token_budget": selection.shape.token_budget,
        }
        for outcome in compare(selection, LADDER, request.cost, options):
            rows.append(Row(name, outcome.strategy, {**setting, **asdict(outcome.report)}))
    return rows


def measured(run: Path) -> Row:
    """Return the padding and imbalance that a run measured, over all of its steps.

    Raises:
        ValueError: The run has no metrics, or a line of them is malformed.
    """
    path = run / "metrics.jsonl"
    sums, steps = {"padding_frames": 0.0, "padding_tokens": 0.0, "rank_imbalance": 0.0}, 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            # A line holds the means of the steps since the line before.
            weight = values["step"] - steps
            for name in sums:
                sums[name] += weight * values[name]
            steps = values["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a line of metrics ({error}).") from error
    if not steps:
        raise ValueError(f"{path}: holds no step.")
    means = {name: value / steps for name, value in sums.items()}
    means["rank_imbalance_mean"] = means.pop("rank_imbalance")
    return Row(run.name, MEASURED, {"steps": steps, **means})


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    columns = [
        ("frames %", "padding_frames", "%"),
        ("tokens %", "padding_tokens", "%"),
        ("FLOPs %", "padding_flops", "%"),
        ("T x U %", "padding_cells", "%"),
        ("imbalance %", "rank_imbalance_mean", "%"),
        ("p99 %", "rank_imbalance_p99", "%"),
        ("utterances", "batch_utterances", ".1f"),
        ("audio s", "batch_audio_seconds", ".0f"),
        ("steps", "steps", ""),
    ]
    lines = [
        f"| lengths | frame budget | strategy | {' | '.join(title for title, _, _ in columns)} |",
        "|---|---|---|" + "---:|" * len(columns),
    ]
    for row in rows:
        cells = [row.lengths, row.cell("frame_budget", ","), row.strategy]
        cells += [row.cell(name, form) for _, name, form in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write all figures; the columns are those of the row that has most."""
    columns = max((row.figures for row in rows), key=len)
    rounded = [
        {"lengths": row.lengths, "strategy": row.strategy}
        | {name: _rounded(value) for name, value in row.figures.items()}
        for row in rows
    ]
    csv_rows.write(path, ["lengths", "strategy", *columns], rounded)


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """Return the padding shares of frames, tokens and FLOPs, over rows that have all three."""
    rows = [row for row in rows if "padding_flops" in row.figures]
    if not rows:
        raise ValueError("`--picture` needs a list: runs measure no FLOPs.")
    panels = []
    for title in ("frames", "tokens", "FLOPs"):
        shares = [row.figures[f"padding_{title.lower()}"] for row in rows]
        useful = [1 - share for share in shares]
        panels.append(Panel(f"{title}: padding %", useful, [percent(s) for s in shares], shares))
    picture = draw(
        [row.strategy for row in rows],
        panels,
        title="Padding, by sampling strategy",
        legend=("utterances", "padding"),
        groups=[f"{row.lengths}, {row.cell('frame_budget', ',')} frames a batch" for row in rows],
    )
    write_atomically(path, picture.encode())


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _paths(argument: str) -> list[Path]:
    whole = Path(argument)
    return [whole] if whole.exists() else [Path(part) for part in argument.split("+")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="+", metavar="LIST_OR_RUN")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8_000], metavar="FRAMES")
    parser.add_argument("--world-size", type=int, default=8, metavar="N")
    parser.add_argument("--batch-size", type=int, metavar="N", help="of random and bucketed")
    parser.add_argument("--recipe", help="whose model's FLOPs (default: canary_180m_flash)")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    given = parser.parse_args(arguments)
    options = StudyOptions(world_size=given.world_size, batch_size=given.batch_size)
    rows = []
    for argument in given.lists:
        if (Path(argument) / "metrics.jsonl").is_file():
            rows.append(measured(Path(argument)))
        else:
            rows += study(_paths(argument), options, budgets=given.budgets, recipe=given.recipe)
    sys.stdout.write(table(rows))
    if given.csv is not None:
        write_csv(given.csv, rows)
    if given.picture is not None:
        write_picture(given.picture, rows)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"padding_study: {error}")
