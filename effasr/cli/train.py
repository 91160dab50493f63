"""``effasr train``: trains a model, or resumes an interrupted run."""

from __future__ import annotations

import argparse
import itertools
import textwrap

from effasr import config
from effasr.cli.options import AddCommand, add_recipe, print_line


def add(command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = command(
        "train",
        run,
        "Train, or go on training: the same command resumes an interrupted run.",
        "On several GPUs: torchrun --nproc-per-node N effasr/train.py RECIPE ...",
        "",
        "recipes:",
        *(_describe(recipe) for recipe in config.recipes()),
    )
    add_recipe(
        parser,
        "a YAML file, or one of those below",
        "a field to change, such as training.max_steps=1000; later ones win",
    )
    parser.add_argument(
        "--show", action="store_true", help="show every field and its value, and do not train"
    )


def run(options: argparse.Namespace) -> int:
    """Train, or print the configuration."""
    from effasr.distributed.process_group import report_once_per_node
    from effasr.training.config import TrainConfig
    from effasr.training.trainer import run

    with report_once_per_node():
        settings = config.load(TrainConfig, options.recipe, options.overrides)
    if options.show:
        print_line(config.dump(settings))
        return 0
    return run(settings)


def _describe(recipe: str) -> str:
    """Return the name of a recipe, and the first sentence of the comment at the top of its file."""
    comment = itertools.takewhile(
        lambda line: line.startswith("#"),
        (config.RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines(),
    )
    sentence = " ".join(line.lstrip("# ") for line in comment).split(". ")[0].rstrip(".")
    return textwrap.fill(sentence, 80, initial_indent=f"  {recipe:18} ", subsequent_indent=" " * 21)
