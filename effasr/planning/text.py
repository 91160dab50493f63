"""Formats a comparison of strategies as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich import box
from rich.table import Table

from effasr.data.sampling.packing import suggest_token_budget
from effasr.evaluation.tables import to_text
from effasr.planning.listing import BYTES_PER_TOKEN, TOKENS_PER_SECOND, Listing
from effasr.planning.selection import Selection
from effasr.planning.study import Outcome, StudyOptions, summarise_mixture

_GOOD = 0.01
"""Padding and imbalance of ranks below this need no advice."""
_MANY_DROPPED = 0.02
_MANY_DEFERRED = 0.1


def summary(listing: Listing, selection: Selection, options: StudyOptions, model: str) -> str:
    """Return the lines above the table: utterances, budgets and remarks."""
    lines = [f"{setting(selection, options)}; FLOPs of {model}", *_remarks(listing)]
    return "\n".join([*lines, *_silence(selection)])


def setting(selection: Selection, options: StudyOptions) -> str:
    """Return a line with the utterances, ranks and budgets."""
    shape = selection.shape
    return (
        f"{len(selection):,} utterances, {selection.seconds.sum() / 3600:,.2f} h; "
        f"{options.world_size} ranks, {options.of_step} micro-batches "
        f"a step, each {shape.frame_budget:,} frames "
        f"({shape.frame_budget * shape.framing.seconds:,.0f} s) and "
        f"{shape.token_budget:,} tokens"
    )


def _remarks(listing: Listing) -> Iterator[str]:
    """Yield remarks on speeds and on estimated token counts."""
    if listing.speeds != (1.0,):
        speeds = ", ".join(map(str, listing.speeds))
        yield f"every utterance is listed at each of the speeds {speeds} (data.speed_perturbation)"
    for count, how in (
        (listing.by_text, f"texts, {BYTES_PER_TOKEN} bytes each: --tokenizer DIR counts them"),
        (listing.by_duration, f"durations, {TOKENS_PER_SECOND} a second"),
    ):
        if count:
            yield f"tokens of {count:,} utterances are estimated from {how}"


def _silence(selection: Selection) -> Iterator[str]:
    """Yield the share of silence in the encoder frames, which does not count as padding."""
    framing = selection.shape.framing
    if framing.minimum:
        heard = selection.seconds.sum() / framing.seconds
        share = 1 - heard / selection.lengths.frames.sum(dtype=np.int64)
        yield (
            f"{percent(share)} % of the encoder frames are silence, as an utterance has at least "
            f"{framing.minimum * framing.seconds:g} s (model.features.minimum_s); it is not padding"
        )


def mixture(selection: Selection, options: StudyOptions) -> str | None:
    """Return the shares of the sources; None if an epoch has every utterance once."""
    found = summarise_mixture(selection, options)
    if found is None:
        return None
    epochs = "an epoch" if options.epochs == 1 else f"{options.epochs} epochs"
    hours = sum(row.drawn_amount for row in found.rows)
    lines = "\n".join(f"    {line}" for line in found.table())
    return f"Sources (data.mix), of which {epochs} of {hours:,.2f} h is drawn:\n\n{lines}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row for each strategy, and a description of its columns."""
    made = Table(box=box.MARKDOWN)
    made.add_column("strategy")
    with_buckets = any(outcome.report.bucket_mismatch is not None for outcome in outcomes)
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
        made.add_column(column, justify="right")
    for outcome in outcomes:
        report = outcome.report
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
        made.add_row(outcome.strategy, *figures, f"{report.steps:,}", f"{report.deferred:,}")
    buckets = ", steps with several buckets" if with_buckets else ""
    return (
        "Padding of encoder frames, decoder tokens, FLOPs and T x U cells; imbalance of ranks "
        f"(mean, p99){buckets};\nmean micro-batch; forward FLOPs of an hour of audio.\n\n"
        f"{to_text(made)}"
    )


def dropped(selection: Selection, listed: str | None) -> str:
    """Return the numbers of dropped utterances by reason."""
    count = len(selection.dropped)
    if not count:
        return "dropped 0 utterances"
    share = count / (count + len(selection))
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in selection.reasons.items())
    where = f"each listed in {listed}" if listed else "--dropped FILE lists each"
    return f"dropped {count:,} utterances ({percent(share)} %): {reasons}; {where}"


def advice(selection: Selection, outcomes: Sequence[Outcome], options: StudyOptions) -> str:
    """Return advice in a sentence: the most important remedy."""
    reasons = selection.reasons
    count = sum(reasons.values())
    if count > _MANY_DROPPED * (count + len(selection)):
        worst = next(iter(reasons))
        return f"Look at the dropped utterances first: {worst} drops {reasons[worst]:,}."
    by_name = {outcome.strategy: outcome.report for outcome in outcomes}
    packed = by_name.get("packed")
    if packed is None:
        worst = max(report.padding_flops for report in by_name.values())
        return (
            f"Plan with --strategy all to see what packed saves: up to {percent(worst)} % of the "
            "FLOPs above are padding."
        )
    if options.of_step % options.world_size:
        return (
            f"{options.world_size} ranks cannot share {options.of_step} micro-batches evenly, and "
            "some wait: make --micro-batches a multiple of --world-size."
        )
    shape = selection.shape
    if packed.deferred > _MANY_DEFERRED * (packed.deferred + packed.planned):
        return (
            f"Steps are large for this corpus, and {packed.deferred:,} utterances are left to the "
            "next epoch: lower --frame-budget or --micro-batches."
        )
    if max(packed.padding_frames, packed.padding_tokens) > _GOOD:
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
    if packed.rank_imbalance_p99 > _GOOD:
        return (
            "Ranks wait for one another: raise --frame-budget, so that longest utterances weigh "
            "less in a batch."
        )
    others = {name: report for name, report in by_name.items() if name != "packed"}
    if not others:
        return "No change is needed: train with these budgets."
    worst = max(others, key=lambda name: others[name].flops_per_audio_hour)
    times = others[worst].flops_per_audio_hour / packed.flops_per_audio_hour
    return (
        f"Train with data.strategy=packed: {worst} batches, padded, compute {times:.1f} times as "
        "much for the same audio."
    )


def percent(share: float) -> str:
    """Format a ratio in percent with the significant digits."""
    value = 100 * share
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
