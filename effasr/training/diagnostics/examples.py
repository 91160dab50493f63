"""Chooses hypotheses to show at a validation, and wraps text for a console."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from effasr.evaluation.result import Evaluation, ScoredUtterance

WIDTH = 100

_MAX_LINES = 4
"""Lines of a text: a looping hypothesis can be arbitrarily long."""

_MARGIN = 19
"""Columns of the label before a text and of the ellipsis after a truncated one."""

_CONSOLE = Console(width=WIDTH, quiet=True)


def choose(
    evaluations: "Mapping[str, Evaluation]", count: int
) -> "dict[str, list[ScoredUtterance]]":
    """Return utterances of each set, ``count`` in all, the same ones at each validation."""
    # Spread over the sets, and within a set over the durations. The shortest and the longest
    # utterances are less representative and come last.
    names = [name for name, evaluation in evaluations.items() if evaluation.utterances]
    chosen: dict[str, list[ScoredUtterance]] = {}
    for number, name in enumerate(names):
        ordered = sorted(evaluations[name].utterances, key=lambda row: (row.duration, row.id))
        share = min(len(range(number, count, len(names))), len(ordered))
        chosen[name] = [
            ordered[(2 * index + 1) * len(ordered) // (2 * share)] for index in range(share)
        ]
    return {name: utterances for name, utterances in chosen.items() if utterances}


def lines(utterance: "ScoredUtterance") -> Iterator[str]:
    """Yield the id, the reference and the hypothesis, aligned below each other."""
    yield f"  {utterance.id}"
    for label, text in (("reference ", utterance.reference), ("hypothesis", utterance.hypothesis)):
        folded = fold(text or "(empty)", WIDTH - _MARGIN)
        if len(folded) > _MAX_LINES:
            folded = [*folded[: _MAX_LINES - 1], f"{folded[_MAX_LINES - 1]} ..."]
        for number, line in enumerate(folded):
            yield f"    {label if not number else ' ' * len(label)} {line}"


def fold(text: str, width: int = WIDTH) -> Sequence[str]:
    """Return the lines of a text, wrapped by columns: a Chinese character takes two."""
    flat = " ".join(text.split())
    return [line.plain.rstrip() for line in Text(flat).wrap(_CONSOLE, width)] or [""]
