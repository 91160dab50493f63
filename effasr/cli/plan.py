"""``effasr plan``: padding, work and dropped utterances of the batches of a corpus."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effasr.checks import check
from effasr.cli.options import (
    AddCommand,
    add_positional,
    at_least,
    print_folded,
    print_line,
    seconds,
)
from effasr.cli.progress import progress_counter, working

if TYPE_CHECKING:
    from effasr.data.index.selection import Selection
    from effasr.planning.listing import Listing
    from effasr.planning.study import PlanRequest, StudyOptions
    from effasr.planning.what_if import Device

_STRATEGIES = ("packed", "random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "all")
"""`effasr.data.sampling.options.STRATEGIES`, which is too slow to import for --help."""

_STRATEGIES_BY_OPTION = {
    "batch_size": ("random", "bucketed", "sync_bucketed"),
    "buckets": ("bucketed", "sync_bucketed", "sync_bucketed_2d"),
    "epoch_end": ("packed",),
}
"""Options that only some strategies have."""


def add(command: AddCommand) -> None:
    parser = command(
        "plan",
        run,
        "Plan batches: padding, work of the ranks, what is dropped.",
        "A manifest is any that `effasr prepare` takes; JSON lines with duration, and num_tokens",
        "or text; a table with a column duration_seconds; or durations alone, one a line. Audio",
        "files are opened only where a line has no duration.",
        "",
        "All strategies but packed are computed padded: each utterance of a micro-batch at the",
        "length of the longest. A batch is a micro-batch, a step has one of each rank or more.",
        example="effasr plan data/train --strategy all",
    )
    text = "manifests or lists of durations (default: those of --recipe)"
    add_positional(parser, "manifest", "MANIFEST", text, many=True)
    parser.add_argument(
        "--strategy",
        choices=_STRATEGIES,
        metavar="STRATEGY",
        help=f"batching strategy: {', '.join(_STRATEGIES[:-1])}, or all to compare them (default: "
        "packed, or RECIPE's)",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="recipe whose model, tokenizer, budgets and limits are used (default: the model of "
        "canary_180m_flash)",
    )
    parser.add_argument(
        "--world-size",
        type=at_least(1),
        metavar="N",
        help="number of ranks (default: the GPUs of this machine, or 1)",
    )
    parser.add_argument(
        "--micro-batches",
        type=at_least(1),
        metavar="N",
        help="micro-batches per step over all ranks (default: RECIPE's if the ranks can share "
        "them, else one per rank)",
    )
    parser.add_argument(
        "--frame-budget",
        type=at_least(1),
        metavar="N",
        help="encoder frames in a micro-batch (default: 8000): of 80 ms, of 40 ms where the model "
        "subsamples by 4, a Whisper's of 20 ms",
    )
    parser.add_argument(
        "--token-budget",
        type=at_least(1),
        metavar="N",
        help="tokens in a micro-batch (default: what the corpus fills with the frames)",
    )
    parser.add_argument(
        "--max-duration",
        type=seconds,
        metavar="S",
        help="longest utterance in seconds; longer ones are dropped (default: 40)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="tokenizer that counts the tokens (default: RECIPE's, else they are estimated)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=at_least(0),
        default=5,
        metavar="N",
        help="tokens before each text, without --tokenizer (default: 5)",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        metavar="N",
        help="utterances in a batch of random, bucketed and sync_bucketed (default: what fills the "
        "frame budget)",
    )
    parser.add_argument(
        "--buckets",
        type=at_least(2),
        metavar="N",
        help="number of duration buckets (default: 20)",
    )
    parser.add_argument(
        "--epochs",
        type=at_least(1),
        default=1,
        metavar="N",
        help="number of epochs to plan (default: 1)",
    )
    parser.add_argument(
        "--epoch-end",
        choices=("carry", "exact"),
        help="end of an epoch with strategy packed; carry (the default, or RECIPE's): full steps "
        "only, the rest moves to the next epoch; exact: each epoch is the corpus, and all steps "
        "share the room that is left",
    )
    parser.add_argument(
        "--seed", type=at_least(0), metavar="N", help="seed of the plans (default: 0, or RECIPE's)"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="compare all strategies and batches of a fixed size within the memory of a "
        "micro-batch: batches, steps, hours and GPUs",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="budgets and speed for --what-if: a file of effasr calibrate",
    )
    parser.add_argument(
        "--tflops",
        type=at_least(1),
        metavar="X",
        help="teraFLOP/s that a GPU sustains in training, for the hours of --what-if",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the comparison")
    parser.add_argument(
        "--dropped", type=Path, metavar="FILE.jsonl", help="list what is left out, and why"
    )


def run(options: argparse.Namespace) -> int:
    import torch

    from effasr.data.atomic_files import write_atomically
    from effasr.planning import report
    from effasr.planning.study import LADDER, PlanRequest, compare

    for name, suffix in (("picture", ".svg"), ("dropped", ".jsonl")):
        _check_output(name, getattr(options, name), suffix)
    device = _device(options)
    request = PlanRequest.from_recipe(
        options.recipe,
        manifests=options.manifest,
        tokenizer=options.tokenizer,
        frame_budget=options.frame_budget or device.frame_budget,
        token_budget=options.token_budget or device.token_budget,
        max_duration=options.max_duration,
    )
    strategy = "all" if options.what_if else options.strategy or request.data.strategy
    _check_strategy(options, strategy)
    if options.world_size is None:
        options.world_size = max(1, torch.cuda.device_count())
    study = _study_options(options, request)
    strategies = LADDER if strategy == "all" else [strategy]
    with progress_counter("utterances read") as show:
        listing, selection = request.read(options.prompt_tokens, show)
    if strategy == "all" and not options.buckets:  # a tiny corpus has no twenty
        rule = "have two utterances or more to compare strategies"
        remedy = "plan --strategy packed alone"
        check(len(selection) > 1, "--manifest", rule, len(selection), remedy)
        buckets = min(study.strategy.buckets, len(selection))
        study = replace(study, strategy=replace(study.strategy, buckets=buckets))
    if options.dropped is not None:
        write_atomically(options.dropped, b"".join(d.json_line() for d in selection.dropped))
    if options.what_if:
        return _what_if(options, request, study, device, listing, selection)
    with working(f"planning {len(selection):,} utterances", "strategies") as planned:
        results = compare(selection, strategies, request.cost, study, planned)
    if options.json:
        common = _setting(listing, selection, study, request.model)
        figures = {result.strategy: {**common, **result.to_json()} for result in results}
        output = figures if strategy == "all" else figures[strategy]
        print_line(json.dumps(output, indent=2))
    else:
        parts = [
            report.summary(listing, selection, study, request.model),
            *filter(None, [report.mixture(selection, study)]),
            report.table(results),
            report.dropped(selection, None if options.dropped is None else str(options.dropped)),
            report.advice(
                selection, results, study, decided=bool(options.recipe) and not options.frame_budget
            ),
        ]
        print_folded("\n\n".join(parts))
    if options.picture is not None:
        title = f"Padding of {', '.join(path.stem for path in request.manifests)}"
        report.padding_picture(
            options.picture, results, title=title, subtitle=report.setting(selection, study)
        )
    return 0


def _device(options: argparse.Namespace) -> Device:
    from effasr.planning.what_if import Device

    for name in ("calibration", "tflops", "strategy", "batch_size"):
        value = getattr(options, name)
        if value is not None and options.what_if != (name in ("calibration", "tflops")):
            verb = "left out with" if options.what_if else "given with"
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be {verb} `--what-if`, but is {value}."
            )
    if options.calibration is None:
        return Device(flops=options.tflops and options.tflops * 1e12)
    check(options.tflops is None, "--tflops", "be left out with `--calibration`", options.tflops)
    return Device.read(options.calibration)


def _what_if(
    options: argparse.Namespace,
    request: PlanRequest,
    study: StudyOptions,
    device: Device,
    listing: Listing,
    selection: Selection,
) -> int:
    from effasr.data.atomic_files import write_atomically
    from effasr.planning import report, what_if

    with working(f"planning {len(selection):,} utterances", "strategies") as planned:
        summaries = what_if.compute(selection, request.cost, study, device, planned)
    if options.picture is not None:
        title = f"Batches of {', '.join(path.stem for path in request.manifests)} at equal memory"
        drawn = what_if.picture(summaries, title, report.setting(selection, study))
        write_atomically(options.picture, drawn.encode())
    if options.json:
        print_line(what_if.to_json(summaries))
        return 0
    parts = [
        report.summary(listing, selection, study, request.model),
        what_if.table(summaries),
        report.dropped(selection, None if options.dropped is None else str(options.dropped)),
        what_if.claims(summaries),
        what_if.assumptions(selection, device, study),
    ]
    print_folded("\n\n".join(parts))
    return 0


def _study_options(options: argparse.Namespace, request: PlanRequest) -> StudyOptions:
    from effasr.planning.study import StudyOptions

    data = request.data
    shared = options.recipe and not data.corpus_micro_batches % options.world_size
    default = data.corpus_micro_batches if shared else options.world_size
    strategy = data.strategy_options(request.limits.framing)
    if options.batch_size:
        strategy = replace(strategy, batch_size=options.batch_size, batch_duration=None)
    return StudyOptions(
        strategy=replace(strategy, buckets=options.buckets or strategy.buckets),
        world_size=options.world_size,
        micro_batches=options.micro_batches or default,
        seed=request.seed if options.seed is None else options.seed,
        epochs=options.epochs,
        epoch_end=options.epoch_end or data.epoch_end,
    )


def _setting(
    listing: Listing, selection: Selection, study: StudyOptions, model: str
) -> dict[str, Any]:
    """Return the fields of the JSON output that all strategies share."""
    from effasr.planning.study import summarise_mixture

    mixture = summarise_mixture(selection, study)
    return {
        "model": model,
        "world_size": study.world_size,
        "micro_batches": study.micro_batches,
        "frame_budget": selection.shape.frame_budget,
        "token_budget": selection.shape.token_budget,
        "seed": study.seed,
        "epochs": study.epochs,
        "utterances": len(selection),
        "hours": round(float(selection.seconds.sum()) / 3600, 6),
        "estimated_tokens": listing.by_text + listing.by_duration,
        "dropped": {**selection.reasons, "total": len(selection.dropped)},
        **({} if mixture is None else {"sources": mixture.mapping()}),
    }


def _check_strategy(options: argparse.Namespace, strategy: str) -> None:
    for name, strategies in _STRATEGIES_BY_OPTION.items():
        value = getattr(options, name)
        if value is not None and strategy not in (*strategies, "all"):
            raise ValueError(
                f"`--{name.replace('_', '-')}` must be left out for strategy {strategy}, which has "
                f"none, but is {value}: it is for {', '.join(strategies)}."
            )


def _check_output(name: str, path: Path | None, suffix: str) -> None:
    if path is None:
        return
    rule, is_file = f"be a file that ends in {suffix}", path.suffix == suffix and not path.is_dir()
    check(is_file, f"--{name}", rule, repr(str(path)), "name another")
    rule = "be in a folder that exists"
    check(path.absolute().parent.is_dir(), f"--{name}", rule, repr(str(path)), "make the folder")
