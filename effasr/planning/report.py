"""A comparison of strategies as Markdown, and as bars in SVG for light and dark pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from effasr.data.atomic_files import write_atomically
from effasr.data.index.selection import Selection
from effasr.data.sampling.packing import suggest_token_budget
from effasr.evaluation.tables import to_text
from effasr.planning.listing import BYTES_PER_TOKEN, TOKENS_PER_SECOND, Listing
from effasr.planning.study import StrategyResult, StudyOptions, summarise_mixture

_GOOD = 0.01  # padding and imbalance of ranks below this need no advice
_BEARABLE = 0.05  # padding of batches that a recipe makes small, because many steps learn sooner
_MANY_DROPPED = 0.02
_MANY_DEFERRED = 0.1


def summary(listing: Listing, selection: Selection, options: StudyOptions, model: str) -> str:
    """Return the lines above the table: utterances, budgets and remarks."""
    lines = [f"{setting(selection, options)}; FLOPs of {model}", *_remarks(listing)]
    return "\n".join([*lines, *_silence(selection)])


def setting(selection: Selection, options: StudyOptions) -> str:
    shape = selection.shape
    return (
        f"{len(selection):,} utterances, {selection.seconds.sum() / 3600:,.2f} h; "
        f"{options.world_size} ranks, {options.micro_batches} micro-batches "
        f"a step, each {shape.frame_budget:,} frames "
        f"({shape.frame_budget * shape.framing.seconds:,.0f} s) and "
        f"{shape.token_budget:,} tokens"
    )


def _remarks(listing: Listing) -> Iterator[str]:
    if listing.speeds != (1.0,):
        speeds = ", ".join(map(str, listing.speeds))
        yield f"every utterance is listed at each of the speeds {speeds} (data.speed_perturbation)"
    for count, source in (
        (listing.by_text, f"texts, {BYTES_PER_TOKEN} bytes each: --tokenizer DIR counts them"),
        (listing.by_duration, f"durations, {TOKENS_PER_SECOND} a second"),
    ):
        if count:
            yield f"tokens of {count:,} utterances are estimated from {source}"


def _silence(selection: Selection) -> Iterator[str]:
    """Yield the share of silence in the encoder frames, which does not count as padding."""
    framing = selection.shape.framing
    if selection.silence is not None:
        share = selection.silence.sum(dtype=np.int64) / selection.samples.sum(dtype=np.int64)
        yield (
            f"{percent(float(share))} % of the audio is silence at the ends of utterances "
            "(data.silence_padding)"
        )
    if framing.minimum:
        audio = selection.seconds.sum() / framing.seconds
        share = 1 - audio / selection.lengths.frames.sum(dtype=np.int64)
        yield (
            f"{percent(share)} % of the encoder frames are silence, as an utterance has at least "
            f"{framing.minimum * framing.seconds:g} s (model.features.minimum_s); it is not padding"
        )


def mixture(selection: Selection, options: StudyOptions) -> str | None:
    """Return the shares of the sources; None if an epoch has every utterance once."""
    summary = summarise_mixture(selection, options)
    if summary is None:
        return None
    epochs = "an epoch" if options.epochs == 1 else f"{options.epochs} epochs"
    hours = sum(row.drawn_amount for row in summary.rows)
    lines = "\n".join(f"    {line}" for line in summary.table())
    return f"Sources (data.mix), of which {epochs} of {hours:,.2f} h is drawn:\n\n{lines}"


def table(results: Sequence[StrategyResult]) -> str:
    """Return a table with one row for each strategy, and a description of its columns."""
    grid = Table(box=box.MARKDOWN)
    grid.add_column("strategy")
    with_buckets = any(result.report.bucket_mismatch is not None for result in results)
    for column in (
        "frames %",
        "tokens %",
        "FLOPs %",
        "cells %",
        "imbalance %",
        "p99 %",
        *(["mixed %"] if with_buckets else []),
        "utts",
        "audio s",
        "TFLOP/h",
        "steps",
        "deferred",
    ):
        grid.add_column(column, justify="right")
    for result in results:
        report = result.report
        mismatch = report.bucket_mismatch
        figures = [
            percent(report.padding_frames),
            percent(report.padding_tokens),
            percent(report.padding_flops),
            percent(report.padding_cells),
            percent(report.rank_imbalance_mean),
            percent(report.rank_imbalance_p99),
            *(["" if mismatch is None else percent(mismatch)] if with_buckets else []),
            f"{report.batch_utterances:.1f}",
            f"{report.batch_audio_seconds:.1f}",
            f"{report.flops_per_audio_hour / 1e12:,.3g}",
        ]
        if not report.planned:
            # All utterances are left to later epochs, and nothing can be said of batches.
            figures = [""] * len(figures)
        grid.add_row(result.strategy, *figures, f"{report.steps:,}", f"{report.deferred:,}")
    buckets = ", steps with several buckets" if with_buckets else ""
    return (
        "Padding of encoder frames, decoder tokens, FLOPs and T x U cells; imbalance of ranks "
        f"(mean, p99){buckets};\nmean micro-batch; forward FLOPs of an hour of audio.\n\n"
        f"{to_text(grid)}"
    )


def dropped(selection: Selection, listed: str | None) -> str:
    count = len(selection.dropped)
    if not count:
        return "dropped 0 utterances"
    share = count / (count + len(selection))
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in selection.reasons.items())
    destination = f"each listed in {listed}" if listed else "--dropped FILE lists each"
    return f"dropped {count:,} utterances ({percent(share)} %): {reasons}; {destination}"


def advice(
    selection: Selection,
    results: Sequence[StrategyResult],
    options: StudyOptions,
    *,
    decided: bool = False,
) -> str:
    """Return the most important remedy in a sentence; a recipe may have decided the frames."""
    reasons = selection.reasons
    count = sum(reasons.values())
    if count > _MANY_DROPPED * (count + len(selection)):
        worst = next(iter(reasons))
        return f"Look at the dropped utterances first: {worst} drops {reasons[worst]:,}."
    by_name = {result.strategy: result.report for result in results}
    packed = by_name.get("packed")
    if packed is None:
        worst = max(report.padding_flops for report in by_name.values())
        return (
            f"Plan with --strategy all to see what packed saves: up to {percent(worst)} % of the "
            "FLOPs above are padding."
        )
    if options.micro_batches % options.world_size:
        return (
            f"{options.world_size} ranks cannot share {options.micro_batches} micro-batches "
            "evenly, and some wait: make --micro-batches a multiple of --world-size."
        )
    shape = selection.shape
    if packed.deferred > _MANY_DEFERRED * (packed.deferred + packed.planned):
        return (
            f"Steps are large for this corpus, and {packed.deferred:,} utterances are left to the "
            "next epoch: lower --frame-budget or --micro-batches."
        )
    if max(packed.padding_frames, packed.padding_tokens) > (_BEARABLE if decided else _GOOD):
        if packed.steps == options.epochs:
            return (
                "The corpus fills no more than one step, and that not well: lower --frame-budget "
                "or --micro-batches."
            )
        if options.epoch_end == "exact":
            return "Leave --epoch-end at carry: what each epoch lacks of a step is padding here."
        fitting = suggest_token_budget(selection.lengths, shape.frame_budget)
        if abs(shape.token_budget - fitting) > 0.01 * fitting:
            return f"Leave --token-budget out: this corpus fills {fitting:,} with the frames."
        return (
            f"A batch of {packed.batch_utterances:.0f} utterances is hard to fill: raise "
            f"--frame-budget above {shape.frame_budget:,}."
        )
    if packed.rank_imbalance_p99 > (_BEARABLE if decided else _GOOD):
        return (
            "Ranks wait for one another: raise --frame-budget, so that longest utterances weigh "
            "less in a batch."
        )
    padded = {name: report for name, report in by_name.items() if name != "packed"}
    if not padded:
        return "No change is needed: train with these budgets."
    worst = max(padded, key=lambda name: padded[name].flops_per_audio_hour)
    times = padded[worst].flops_per_audio_hour / packed.flops_per_audio_hour
    return (
        f"Train with data.strategy=packed: {worst} batches, padded, compute {times:.1f} times as "
        "much for the same audio."
    )


def percent(share: float) -> str:
    """Format a ratio in percent with the significant digits."""
    value = 100 * share
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


_STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.head { font-weight: 600; }
.quiet { fill: #59636e; }
.filled { fill: #0969da; }
.rest { fill: #f0b37e; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .filled { fill: #4493f8; }
  .rest { fill: #8a4f1d; }
}"""
_CHARACTER = 7.3
"""Mean width of a character, rounded up so that names do not run into bars with any system font."""
_BAR = 170
_LABEL = 62
_GAP = 18
_TOP = 92
_ROW = 30
_HEIGHT = 18
_BASE = 14  # distance of a label's baseline from the top of its bar


@dataclass(frozen=True, slots=True)
class Panel:
    """A column of bars, one for each row; the longest bar takes the whole width."""

    title: str  # above the bars, with the unit
    filled: Sequence[float]  # lengths of the first parts of the bars
    labels: Sequence[str]  # to the right of the bars
    rest: Sequence[float] | None = None  # lengths of the second parts


def padding_picture(
    path: Path, results: Sequence[StrategyResult], *, title: str, subtitle: str
) -> None:
    """Draw the share of padding in the frames, tokens and FLOPs of each strategy."""
    panels = [
        Panel(
            f"{name}: padding %",
            [1 - share for share in shares],
            [percent(share) for share in shares],
            shares,
        )
        for name, field in (
            ("frames", "padding_frames"),
            ("tokens", "padding_tokens"),
            ("FLOPs", "padding_flops"),
        )
        for shares in [[getattr(result.report, field) for result in results]]
    ]
    rows = [result.strategy for result in results]
    picture = draw(rows, panels, title=title, subtitle=subtitle, legend=("utterances", "padding"))
    write_atomically(path, picture.encode())


def draw(
    rows: Sequence[str],
    panels: Sequence[Panel],
    *,
    title: str,
    subtitle: str = "",
    legend: tuple[str, str] | None = None,
    groups: Sequence[str] | None = None,
) -> str:
    """Return panels side by side as SVG; where a row's group changes, it is a heading."""
    headings: list[tuple[float, str]] = []
    tops: list[float] = []
    top = float(_TOP)
    for row in range(len(rows)):
        if groups is not None and (not row or groups[row] != groups[row - 1]):
            headings.append((top, groups[row]))
            top += _ROW
        tops.append(top)
        top += _ROW
    names = round(_CHARACTER * max(map(len, rows), default=0)) + _GAP
    width = names + len(panels) * (_BAR + _LABEL + _GAP) - _GAP
    height = tops[-1] + _ROW + 6 if tops else _TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">',
        f"<style>\n{_STYLE}\n</style>",
        _text(0, 18, title, "title"),
        _text(0, 38, subtitle, "quiet"),
        *(_legend(width, legend) if legend else ()),
        *(_text(0, top + _BASE, name, "head") for top, name in headings),
        *(_text(0, top + _BASE, name) for top, name in zip(tops, rows, strict=True)),
    ]
    for number, panel in enumerate(panels):
        remaining = names + number * (_BAR + _LABEL + _GAP)
        parts.append(_text(remaining, _TOP - 14, panel.title, "head"))
        parts += _bars(remaining, panel, tops)
    return "\n".join([*parts, "</svg>", ""])


def _bars(left: float, panel: Panel, tops: Sequence[float]) -> list[str]:
    remainder = panel.rest or [0.0] * len(tops)
    if not len(panel.filled) == len(panel.labels) == len(remainder) == len(tops):
        raise ValueError(f"`panels`: {panel.title!r} must have {len(tops)} bars, one for each row.")
    scale = _BAR / (
        max((a + b for a, b in zip(panel.filled, remainder, strict=True)), default=0) or 1
    )
    parts = []
    for top, first, second, label in zip(tops, panel.filled, remainder, panel.labels, strict=True):
        parts.append(_bar(left, top, first * scale, "filled"))
        parts.append(_bar(left + first * scale, top, second * scale, "rest"))
        parts.append(_text(left + (first + second) * scale + 6, top + _BASE, label))
    return parts


def _legend(width: float, legend: tuple[str, str]) -> list[str]:
    parts = []
    remaining = width - 210.0
    for kind, meaning in zip(("filled", "rest"), legend, strict=True):
        parts += [
            _bar(remaining, 8, 14, kind, height=12),
            _text(remaining + 20, 18, meaning, "quiet"),
        ]
        remaining += 110
    return parts


def _bar(left: float, top: float, width: float, kind: str, height: float = _HEIGHT) -> str:
    return (
        f'<rect class="{kind}" x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height}"/>'
    )


def _text(left: float, base: float, content: str, kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{left:.2f}" y="{base:g}"{css}>{escape(content)}</text>'
