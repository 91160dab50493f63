"""Comparison of several evaluations of the same sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from effasr.data.checksums import verify
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.evaluation.bootstrap import interval, probability_of_improvement
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import HYPOTHESES, SUMMARY, read_summary
from effasr.evaluation.tables import percent, to_text
from effasr.evaluation.wer import ErrorCounts, count_errors, total


@dataclass(frozen=True, slots=True)
class Scored:
    system: str  # name of the run, or of the folder
    set_name: str
    errors: dict[str, ErrorCounts]  # errors of each utterance by id
    rtfx: float
    failed: int  # utterances that could not be transcribed


def read_run(run: str | Path, normalizer: str | None = None) -> list[Scored]:
    """Return the evaluations of a run, or the one in a folder of ``effasr evaluate --output``.

    The set of such a folder is the one in its ``wer.json``, and the folder names the system; in
    ``runs/NAME/evaluation`` it is ``NAME/FOLDER``. A folder with the name of the set, or of an
    earlier version, is ``SYSTEM/SET``.
    """
    run = Path(run)
    if (run / SUMMARY).is_file():
        return [_read(run, None, run.absolute().name, normalizer)]
    folders = sorted(path.parent for path in run.glob(f"evaluation/*/{SUMMARY}"))
    if not folders:
        raise ValueError(f"{run}: holds no evaluation: `effasr evaluate {run} M` makes one.")
    return [_read(folder, run.name, folder.name, normalizer) for folder in folders]


def compare(scored: Sequence[Scored]) -> str:
    """Return a table by set and system, compared with the set's first on common utterances."""
    table = Table(box=box.MARKDOWN)
    for column in (
        "set",
        "system",
        "utterances",
        "WER %",
        "95 %",
        "CER %",
        "RTFx",
        "against first",
    ):
        table.add_column(column, justify="left" if column in ("set", "system") else "right")
    scored = _numbered_where_equal(scored)
    for name in dict.fromkeys(item.set_name for item in scored):
        systems = [item for item in scored if item.set_name == name]
        for item in systems:
            counts = total(item.errors.values())
            low, high = interval(list(item.errors.values()))
            table.add_row(
                name,
                item.system,
                f"{counts.utterances}" + (f" (-{item.failed})" if item.failed else ""),
                percent(counts.wer),
                f"{percent(low)} - {percent(high)}",
                percent(counts.cer),
                f"{item.rtfx:.0f}",
                "" if item is systems[0] else _against(systems[0], item),
            )
    return to_text(table) + "\n"


def _numbered_where_equal(scored: Sequence[Scored]) -> list[Scored]:
    """Return the results with numbers after names that several systems of a set have."""
    count = Counter((item.set_name, item.system) for item in scored)
    seen: Counter[tuple[str, str]] = Counter()
    result = []
    for item in scored:
        key = item.set_name, item.system
        seen[key] += 1
        is_unique = count[key] == 1
        result.append(item if is_unique else replace(item, system=f"{item.system} ({seen[key]})"))
    return result


def _against(first: Scored, item: Scored) -> str:
    common = [name for name in first.errors if name in item.errors]
    before = [first.errors[name] for name in common]
    after = [item.errors[name] for name in common]
    if not common or not total(before).words:
        return "-"
    difference = 100 * (total(after).wer - total(before).wer)
    better = probability_of_improvement(before, after)
    return f"{difference:+.2f} (better: {100 * better:.0f} %)"


def _read(folder: Path, system: str | None, set_name: str, normalizer: str | None) -> Scored:
    """Read an evaluation; without a ``system``, its names follow from those of the folder."""
    try:
        summary: dict[str, Any] = read_summary(folder)
        if system is None:
            *_, above, folder_name = ("", *folder.absolute().parts)
            set_name = str(summary.get("set", folder_name))
            if above == "evaluation":
                # runs/NAME/evaluation/SET, or another name for another search.
                above = folder.absolute().parts[-3]
                folder_name = folder_name if set_name == folder_name else f"{above}/{folder_name}"
            system = above if set_name == folder_name else folder_name
        path = folder / HYPOTHESES
        verify(folder, summary.get("files", {}))
        rows = [parse_object(line, f"{path}:{number}") for number, line in numbered_lines(path)]
        errors = {}
        for row in rows:
            normalize = get_normalizer(normalizer or summary["normalizer"], row.get("language", ""))
            texts = normalize(row["reference"]), normalize(row["hypothesis"])
            errors[str(row["id"])] = count_errors(*texts)
        return Scored(system, set_name, errors, float(summary["rtfx"]), int(summary["failed"]))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{folder}: not an evaluation that can be read ({type(error).__name__}: {error}): "
            "make it again with `effasr evaluate`."
        ) from error
