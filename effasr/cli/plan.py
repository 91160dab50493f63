"""``effasr plan``: what batches a corpus makes, before anything is trained."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effasr.planning.listing import Listing
    from effasr.planning.request import Request
    from effasr.planning.selection import Selection
    from effasr.planning.study import StudyOptions

_STRATEGIES = ("packed", "random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "all")
"""`effasr.data.sampling.options.STRATEGIES`, whose import takes longer than --help may."""

_OF_STRATEGIES = {
    "batch_size": ("random", "bucketed", "sync_bucketed"),
    "buckets": ("bucketed", "sync_bucketed", "sync_bucketed_2d"),
    "epoch_end": ("packed",),
}
"""Options that not every strategy has."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    one = command(
        "plan",
        run,
        "Plan batches: padding, work of the ranks, what is dropped.",
        "A manifest is any that `effasr prepare` takes; JSON lines with duration, and num_tokens",
        "or text; a table with a column duration_seconds; or durations alone, one a line. Audio",
        "files are opened only where a line has no duration.",
        "",
        "All strategies but packed are computed padded: each utterance of a micro-batch at the",
        "length of the longest. A batch is a micro-batch, a step has one of each rank or more.",
    )
    one.add_argument(
        "--manifest",
        type=Path,
        nargs="+",
        default=[],
        metavar="MANIFEST",
        help="manifests or lists of durations (default: those of --recipe)",
    )
    one.add_argument(
        "--strategy", choices=_STRATEGIES, help="all compares them (default: packed, or RECIPE's)"
    )
    one.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="whose model, tokenizer, budgets and limits to use (default: the model of "
        "canary_180m_flash)",
    )
    one.add_argument(
        "--world-size", type=_whole(1), default=8, metavar="N", help="ranks (default: 8)"
    )
    one.add_argument(
        "--micro-batches",
        type=_whole(1),
        metavar="N",
        help="of a step, over all ranks (default: RECIPE's if they can share them, else one each)",
    )
    one.add_argument(
        "--frame-budget",
        type=_whole(1),
        metavar="N",
        help="encoder frames (80 ms; a Whisper's 20 ms) in a micro-batch (default: 8000)",
    )
    one.add_argument(
        "--token-budget",
        type=_whole(1),
        metavar="N",
        help="tokens in a micro-batch (default: what the corpus fills with the frames)",
    )
    one.add_argument(
        "--max-duration",
        type=_seconds,
        metavar="S",
        help="seconds, longer utterances are dropped (default: 40)",
    )
    one.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="to count tokens, not to estimate them"
    )
    one.add_argument(
        "--prompt-tokens",
        type=_whole(0),
        default=5,
        metavar="N",
        help="tokens before each text, without --tokenizer (default: 5)",
    )
    one.add_argument(
        "--batch-size",
        type=_whole(1),
        metavar="N",
        help="utterances of a batch of random, bucketed and sync_bucketed (default: what fills "
        "the frame budget)",
    )
    one.add_argument("--buckets", type=_whole(2), metavar="N", help="by duration (default: 20)")
    one.add_argument(
        "--epochs", type=_whole(1), default=1, metavar="N", help="to plan (default: 1)"
    )
    one.add_argument(
        "--epoch-end",
        choices=("carry", "exact"),
        help="of packed; carry (the default, or RECIPE's): full steps only, and what is too much "
        "goes to the next epoch; exact: each epoch is the corpus, and all steps share the room "
        "that is left",
    )
    one.add_argument("--seed", type=_whole(0), metavar="N", help="default: 0")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the padding")
    one.add_argument(
        "--dropped", type=Path, metavar="FILE.jsonl", help="list what is left out, and why"
    )


def run(options: argparse.Namespace) -> int:
    """Plan, and show what it costs."""
    from effasr.planning import text
    from effasr.planning.picture import padding_picture
    from effasr.planning.request import Request
    from effasr.planning.study import LADDER, compare

    for name, suffix in (("picture", ".svg"), ("dropped", ".jsonl")):
        _check_output(name, getattr(options, name), suffix)
    request = Request.of(
        options.recipe,
        manifests=options.manifest,
        tokenizer=options.tokenizer,
        frame_budget=options.frame_budget,
        token_budget=options.token_budget,
        max_duration=options.max_duration,
    )
    strategy = options.strategy or request.data.strategy
    _check_strategy(options, strategy)
    study = _study_options(options, request)
    listing, selection = request.read(options.prompt_tokens)
    outcomes = compare(selection, LADDER if strategy == "all" else [strategy], request.cost, study)
    if options.dropped is not None:
        _list_dropped(options.dropped, selection)
    if options.json:
        common = _setting(listing, selection, study, request.model)
        made = {one.strategy: {**common, **one.to_json()} for one in outcomes}
        shown = made if strategy == "all" else made[strategy]
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        parts = [
            text.summary(listing, selection, study, request.model),
            *filter(None, [text.mixture(selection, study)]),
            text.table(outcomes),
            text.dropped(selection, None if options.dropped is None else str(options.dropped)),
            text.advice(selection, outcomes, study),
        ]
        sys.stdout.write("\n\n".join(parts) + "\n")
    if options.picture is not None:
        title = f"Padding of {', '.join(path.stem for path in request.manifests)}"
        padding_picture(
            options.picture, outcomes, title=title, subtitle=text.setting(selection, study)
        )
    return 0


def _study_options(options: argparse.Namespace, request: Request) -> StudyOptions:
    from effasr.planning.study import StudyOptions

    data = request.data
    of_recipe = None
    if options.recipe and not data.speech_micro_batches % options.world_size:
        of_recipe = data.speech_micro_batches
    given = data.strategy_options(request.limits.framing)
    return StudyOptions(
        world_size=options.world_size,
        micro_batches=options.micro_batches or of_recipe,
        seed=request.seed if options.seed is None else options.seed,
        epochs=options.epochs,
        epoch_end=options.epoch_end or data.epoch_end,
        batch_duration=None if options.batch_size else given.batch_duration,
        batch_size=options.batch_size or given.batch_size,
        buckets=options.buckets or given.buckets,
        table=given.table,
    )


def _setting(
    listing: Listing, selection: Selection, study: StudyOptions, model: str
) -> dict[str, Any]:
    """What is the same for all strategies."""
    from effasr.planning.study import summarise_mixture

    blend = summarise_mixture(selection, study)
    return {
        "model": model,
        "world_size": study.world_size,
        "micro_batches": study.of_step,
        "frame_budget": selection.shape.frame_budget,
        "token_budget": selection.shape.token_budget,
        "seed": study.seed,
        "epochs": study.epochs,
        "utterances": len(selection),
        "hours": round(float(selection.seconds.sum()) / 3600, 6),
        "estimated_tokens": listing.by_text + listing.by_duration,
        "dropped": {**selection.reasons, "total": len(selection.dropped)},
        **({} if blend is None else {"sources": blend.mapping()}),
    }


def _list_dropped(path: Path, selection: Selection) -> None:
    from effasr.data.atomic_files import atomic_file

    with atomic_file(path) as file:
        for drop in selection.dropped:
            file.write(json.dumps(asdict(drop), ensure_ascii=False).encode() + b"\n")


def _check_strategy(options: argparse.Namespace, strategy: str) -> None:
    """An option that would change nothing is a mistake."""
    for name, strategies in _OF_STRATEGIES.items():
        value = getattr(options, name)
        if value is not None and strategy not in (*strategies, "all"):
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be left out for strategy {strategy}, which has "
                f"none, but is {value}: it is for {', '.join(strategies)}."
            )


def _check_output(name: str, path: Path | None, suffix: str) -> None:
    """Before the work, and not after it."""
    if path is None:
        return
    if path.suffix != suffix or path.is_dir():
        raise ValueError(f"`--{name}` must be a file that ends in {suffix}, but is {str(path)!r}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`--{name}` must be in a folder that exists, but is {str(path)!r}.")


def _whole(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, but is {text!r}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds over 0, but is {text!r}")
    return value
