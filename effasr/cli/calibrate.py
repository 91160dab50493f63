"""``effasr calibrate``: finds the batch budgets that fit this machine."""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from effasr.cli.options import AddCommand, add_recipe, log, print_folded, print_line
from effasr.cli.progress import working

if TYPE_CHECKING:
    from effasr.training.calibration.store import Calibration


def add(command: AddCommand) -> None:
    parser = command(
        "calibrate",
        run,
        "Find the budgets that fit this machine, by a few short trials.",
        "What it finds is kept in ~/.cache/effasr/calibration, where `effasr train` with",
        "data.frame_budget=auto looks for it; without one, training calibrates by itself.",
        example="effasr calibrate small data.train=data/train",
    )
    add_recipe(parser, "a YAML file, or the name of a recipe", "a field to change, as for train")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-bytes", metavar="N", help="memory that training may take, in bytes"
    )
    target.add_argument(
        "--target-share",
        metavar="X",
        help="memory that training may take, as a share of the GPU's or the host's",
    )
    parser.add_argument(
        "--objective",
        choices=("throughput", "memory"),
        help="budget to find; throughput: the smallest that is nearly the fastest (default); "
        "memory: the largest that fits",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, as in calibration.json"
    )


def run(options: argparse.Namespace) -> int:
    from effasr import config as configuration
    from effasr.distributed.process_group import choose_device
    from effasr.training.calibration.calibrate import calibrate, read_population, target_bytes
    from effasr.training.config import TrainConfig
    from effasr.training.resolve import find_tokenizer, resolve_config

    settings = [
        f"calibration.{name}={value}"
        for name in ("target_bytes", "target_share", "objective")
        if (value := getattr(options, name)) is not None
    ]
    overrides = [*options.overrides, *settings, "data.frame_budget=auto"]
    config = resolve_config(configuration.load(TrainConfig, options.recipe, overrides), None)
    device = choose_device(config.training.device)
    tokenizer = find_tokenizer(config, None)
    with working("reading the corpus"):
        population = read_population(config, tokenizer)
    target = target_bytes(config.calibration, device, os.environ)
    with working("running trials"):
        result = calibrate(
            config, tokenizer.vocab_size, population, device, target, note=partial(log, "calibrate")
        )
    if options.json:
        print_line(result.to_json())
    else:
        print_folded(text(result, [*options.overrides, *settings]))
    return 0


def text(result: "Calibration", overrides: Sequence[str] = ()) -> str:
    """Return a report of a calibration; ``overrides`` are those that training needs to find it."""
    from effasr.training.calibration.store import buckets_path_of, path_of
    from effasr.training.memory import gib

    why = {
        "memory": "more does not fit",
        "throughput": f"more is hardly faster; {result.largest_frame_budget} would fit",
        "corpus": "the corpus fills no larger step",
    }[result.limited_by]
    lines = [
        f"frame budget   {result.frame_budget} ({why})",
        f"token budget   {result.token_budget}",
        f"peak memory    {gib(result.measured_bytes)} with the longest utterances together; "
        f"predicted {gib(result.predicted_bytes)} ({100 * result.prediction_error:+.1f} %)",
        f"target         {gib(result.target_bytes)}, of which predictions leave "
        f"{100 * result.margin:.0f} % free",
        f"speed          {result.audio_seconds_per_second:.0f} s of audio per second",
        f"trials         {len(result.trials)} in {result.seconds:.0f} s",
        "",
        f"kept           {path_of(result.fingerprint)}",
        *(
            [f"buckets        {buckets_path_of(result.fingerprint)}"]
            if result.bucket_batch_sizes
            else []
        ),
        "",
        "to use it:",
        f"  {' '.join(['data.frame_budget=auto', *overrides])}",
        "or, with the numbers:",
        f"  data.frame_budget={result.frame_budget} data.token_budget={result.token_budget} "
        f"data.max_sequences={result.max_sequences}",
        "",
        "Steps of another size than the recipe's need another training.max_steps and optimizer.lr:",
        "where the recipe fits in memory, leave it.",
    ]
    return "\n".join(lines)
