"""Comparison of several evaluations of the same sets."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from effasr.data.checksums import verify
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.evaluation.bootstrap import interval, probability_of_improvement, rate
from effasr.evaluation.metric import BY_NAME
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import HYPOTHESES, SUMMARY, read_summary, score_translations
from effasr.evaluation.tables import to_text
from effasr.evaluation.translation import (
    MissingPackage,
    TranslationCounts,
    check_package,
    count_ngrams,
)
from effasr.evaluation.wer import ErrorCounts, count_errors, total


@dataclass(frozen=True, slots=True)
class Scored:
    system: str  # name of the run, or of the folder
    set_name: str
    counts: Mapping[str, ErrorCounts] | Mapping[str, TranslationCounts]  # by id of the utterance
    rtfx: float
    failed: int  # utterances that could not be transcribed
    second: float  # character error rate, or chrF
    group: str = ""  # languages of translations

    @property
    def title(self) -> str:
        return f"{self.set_name} {self.group}".rstrip()


def read_run(run: str | Path, normalizer: str | None = None) -> list[Scored]:
    """Return the evaluations of a run, or the one in a folder of ``effasr evaluate --output``.

    The set of such a folder is the one in its ``wer.json``, and the folder names the system; in
    ``runs/NAME/evaluation`` it is ``NAME/FOLDER``. A folder with the name of the set, or of an
    earlier version, is ``SYSTEM/SET``.
    """
    run = Path(run)
    if (run / SUMMARY).is_file():
        return _read(run, None, run.absolute().name, normalizer)
    folders = sorted(path.parent for path in run.glob(f"evaluation/*/{SUMMARY}"))
    if not folders:
        raise ValueError(f"{run}: holds no evaluation: `effasr evaluate {run} M` makes one.")
    return [
        scored for folder in folders for scored in _read(folder, run.name, folder.name, normalizer)
    ]


def compare(scored: Sequence[Scored]) -> str:
    """Return a table by set and system, compared with the set's first on common utterances.

    Translations have a table of their own, with a set for each pair of languages. Systems with
    other utterances than the first are named below.
    """
    scored = _numbered_where_equal(scored)
    parts = [[x for x in scored if bool(x.group) == is_other] for is_other in (False, True)]
    tables = "\n\n".join(to_text(_table(part)) for part in parts if part) + "\n"
    firsts = {item.title: item for item in reversed(scored)}
    return tables + "".join(
        f"{item.title}: {item.system} has {len(first.counts.keys() & item.counts)} of the "
        f"{len(first.counts)} utterances of {first.system}, and {len(item.counts)} in all: their "
        "error rates are of different sets.\n"
        for item in scored
        if item.counts.keys() != (first := firsts[item.title]).counts.keys()
    )


def _table(scored: Sequence[Scored]) -> Table:
    metric, second = (BY_NAME[x] for x in (("bleu", "chrf") if scored[0].group else ("wer", "cer")))
    table = Table(box=box.MARKDOWN)
    figures = f"{metric.label}{metric.unit}", "95 %", f"{second.label}{second.unit}"
    for column in ("set", "system", "utterances", *figures, "RTFx", "against first"):
        table.add_column(column, justify="left" if column in ("set", "system") else "right")
    for name in dict.fromkeys(item.title for item in scored):
        systems = [item for item in scored if item.title == name]
        for item in systems:
            low, high = interval(list(item.counts.values()))
            table.add_row(
                name,
                item.system,
                f"{len(item.counts)}" + (f" (-{item.failed})" if item.failed else ""),
                metric.figure(rate(list(item.counts.values()))),
                f"{metric.figure(low)} - {metric.figure(high)}",
                second.figure(item.second),
                f"{item.rtfx:.0f}",
                "" if item is systems[0] else _against(systems[0], item),
            )
    return table


def _numbered_where_equal(scored: Sequence[Scored]) -> list[Scored]:
    """Return the results with numbers after names that several systems of a set have."""
    count = Counter((item.title, item.system) for item in scored)
    seen: Counter[tuple[str, str]] = Counter()
    result = []
    for item in scored:
        key = item.title, item.system
        seen[key] += 1
        is_unique = count[key] == 1
        result.append(item if is_unique else replace(item, system=f"{item.system} ({seen[key]})"))
    return result


def _against(first: Scored, item: Scored) -> str:
    common = [name for name in first.counts if name in item.counts]
    before = [first.counts[name] for name in common]
    after = [item.counts[name] for name in common]
    if not common or not sum(counts.words for counts in before):
        return "-"
    difference = before[0].metric.factor * (rate(after) - rate(before))
    better = probability_of_improvement(before, after)
    return f"{difference:+.2f} (better: {100 * better:.0f} %)"


def _read(folder: Path, system: str | None, set_name: str, normalizer: str | None) -> list[Scored]:
    """Read an evaluation; without a ``system``, its names follow from those of the folder.

    Transcriptions come first, then the translations of each pair of languages.
    """
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
        errors: dict[str, ErrorCounts] = {}
        texts: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        for row in rows:
            name, pair = str(row["id"]), (row["reference"], row["hypothesis"])
            if row.get("group"):
                check_package()
                texts[row["group"]][name] = pair
                continue
            normalize = get_normalizer(normalizer or summary["normalizer"], row.get("language", ""))
            errors[name] = count_errors(*map(normalize, pair))
        rtfx, failed = float(summary["rtfx"]), int(summary["failed"])
        scored = []
        if errors or not texts:
            cer = total(errors.values()).cer
            scored.append(Scored(system, set_name, errors, rtfx, failed, cer))
        for group, pairs in sorted(texts.items()):
            language = group.rpartition("->")[2]
            counts = {name: count_ngrams(*pair, language) for name, pair in pairs.items()}
            chrf = score_translations(*zip(*pairs.values(), strict=True), language).chrf
            scored.append(Scored(system, set_name, counts, rtfx, failed, chrf, group))
        return scored
    except MissingPackage:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{folder}: not an evaluation that can be read ({type(error).__name__}: {error}): "
            "make it again with `effasr evaluate`."
        ) from error
