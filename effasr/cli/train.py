"""``effasr train``: trains a model, or resumes an interrupted run."""

import argparse

from effasr import config
from effasr.cli.installation.recipes import describe
from effasr.cli.options import AddCommand, add_recipe, print_line


def add(command: AddCommand) -> None:
    parser = command(
        "train",
        run,
        "Train; the same command resumes an interrupted run.",
        "On several GPUs: torchrun --nproc-per-node N effasr/train.py RECIPE ...",
        "",
        "recipes:",
        *(describe(recipe) for recipe in config.recipes()),
        example="effasr train small name=mine data.train=data/train",
    )
    add_recipe(
        parser,
        "a YAML file, or the name of a recipe: `effasr recipes` lists them",
        "a field to change, such as training.max_steps=1000; later ones win",
    )
    parser.add_argument(
        "--show", action="store_true", help="show every field and its value, and do not train"
    )


def run(options: argparse.Namespace) -> int:
    from effasr.distributed.failures import report_once_per_node
    from effasr.training.config import TrainConfig

    with report_once_per_node():
        settings = config.load(TrainConfig, options.recipe, options.overrides)
    if options.show:
        print_line(config.dump(settings))
        return 0
    # Takes a second, for which an error in the recipe need not wait.
    from effasr.training.trainer import run

    return run(settings)
