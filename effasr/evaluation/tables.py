"""Evaluation results as tables of text, valid Markdown."""

import io
import math
from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from effasr.evaluation.alignment import align
from effasr.evaluation.metric import BY_NAME
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation
from effasr.evaluation.wer import ErrorCounts
from effasr.transcription.json_files import one_line
from effasr.untrusted.display import display_width, fold

_MOST_FAILURES = 20  # failures that are listed; ``wer.json`` has all of them

_WIDE = 10_000  # columns of a table that is written to a file or a pipe: no row is folded


def report(evaluation: Evaluation, worst: int = 0) -> str:
    """Return the ``worst`` utterances, and below them the error rates and the failures."""
    table, listed = wer_table(evaluation), worst_table(evaluation, worst)
    return f"{listed}\n{table}" if listed else table


def wer_table(evaluation: Evaluation) -> str:
    """Return a row per language, with several languages one for all, and the speed.

    Translations have a table of their own.
    """
    translations = evaluation.translations
    groups = {k: errors for k, errors in evaluation.groups.items() if k not in translations}
    lines = []
    if groups or not translations:
        table = _table("set", "utterances", "words", "WER %", "CER %", "ins", "del", "sub")
        for group, errors in groups.items():
            table.add_row(Text(group), *_cells(errors))
        if len(groups) != 1:
            table.add_row("all", *_cells(evaluation.errors))
        lines.append(to_text(table))
    if translations:
        table = _table("translations", "utterances", "BLEU", "95 %", "chrF")
        for group, score in translations.items():
            low, high = score.bleu_interval
            figures = f"{score.bleu:.2f}", f"{low:.2f} - {high:.2f}", f"{score.chrf:.2f}"
            table.add_row(Text(group), str(score.utterances), *figures)
        lines.append(to_text(table))
        lines += dict.fromkeys(
            f"{BY_NAME[name].label} {text}"
            for score in translations.values()
            for name, text in score.signatures.items()
        )
    lines += [
        f"normalizer {evaluation.normalizer}, RTFx {evaluation.rtfx:.1f} "
        f"({evaluation.audio_seconds:.0f} s of audio in {evaluation.seconds:.1f} s)",
    ]
    if groups and (interval := evaluation.interval) is not None:
        low, high = map(percent, interval)
        lines.append(
            f"95 % confidence interval of the {evaluation.errors.main_rate[0]} (bootstrap over "
            f"utterances): {low} to {high} %"
        )
    if groups and evaluation.nbest:
        rate, oracle = evaluation.oracle.main_rate
        lines.append(
            f"{rate} of the best of {evaluation.nbest} alternatives (oracle): {percent(oracle)} %"
        )
    if (confidence := evaluation.confidence) is not None and confidence.words:
        ece, auc = (
            percent(confidence.ece),
            "-" if confidence.auc is None else f"{confidence.auc:.3f}",
        )
        kind = "calibrated" if evaluation.calibrated else "raw"
        lines.append(
            f"confidence of {confidence.words} words ({kind}): calibration error {ece} %, area "
            f"under the curve {auc}"
        )
    if evaluation.truncated:
        lines.append(f"{evaluation.truncated} were cut at the maximum length")
    if evaluation.failures:
        lines.append(f"{len(evaluation.failures)} failed and are not counted:")
        first = evaluation.failures[:_MOST_FAILURES]
        width = display_width() or _WIDE
        for failure in first:
            row = f"  {one_line(failure.id)}: {one_line(failure.reason)}"
            lines += fold(row, width, "    ")
        if len(first) < len(evaluation.failures):
            lines.append(f"  and {len(evaluation.failures) - len(first)} more")
    return "\n".join(lines) + "\n"


def _table(*columns: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def worst_table(evaluation: Evaluation, count: int) -> str:
    lines = []
    for utterance in evaluation.worst(count):
        normalize = get_normalizer(evaluation.normalizer, utterance.language)
        errors = utterance.errors
        aligned = align(normalize(utterance.reference), normalize(utterance.hypothesis))
        lines += [
            f"{one_line(utterance.id)}: {errors.errors} errors in {errors.words} words",
            *aligned.lines("  ", display_width()),
        ]
    return "\n".join(lines) + "\n" if lines else ""


def to_text(table: Table, width: int | None = None) -> str:
    if width is None and (limit := display_width()) is not None:
        return "\n\n".join(_render(part, _WIDE) for part in _parts(table, limit))
    return _render(table, width or _WIDE)


def _parts(table: Table, limit: int) -> Iterator[Table]:
    """Divide the columns of a table, so that each part fits; all but the first column are moved."""
    first, *other_items = ((column, [column.header, *column.cells]) for column in table.columns)
    widths = {id(column): max(map(_width, cells)) + 3 for column, cells in (first, *other_items)}
    while other_items:
        columns_left, used = limit - 1 - widths[id(first[0])], 0
        while used < len(other_items) and (
            not used or columns_left >= widths[id(other_items[used][0])]
        ):
            columns_left -= widths[id(other_items[used][0])]
            used += 1
        part = Table(box=table.box)
        for column, _ in (first, *other_items[:used]):
            part.add_column(column.header, justify=column.justify)
        for row in zip(
            first[0].cells, *(column.cells for column, _ in other_items[:used]), strict=True
        ):
            part.add_row(*row)
        yield part
        other_items = other_items[used:]


def _width(cell: RenderableType) -> int:
    return cell_len(cell.plain if isinstance(cell, Text) else str(cell))


def _render(table: Table, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())


def _cells(errors: ErrorCounts) -> list[str]:
    counts = (errors.insertions, errors.deletions, errors.substitutions)
    rates = (percent(errors.wer), percent(errors.cer))
    return [str(errors.utterances), str(errors.words), *rates, *map(str, counts)]


def percent(rate: float | None) -> str:
    """Return a rate in percent; a dash where it is undefined."""
    return "-" if rate is None or math.isnan(rate) else f"{100 * rate:.2f}"
