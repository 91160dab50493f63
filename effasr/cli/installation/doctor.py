"""``effasr doctor``: shows what is installed, and what serves each operation."""

import argparse

from effasr.cli.options import AddCommand, print_line
from effasr.cli.progress import working


def add(command: AddCommand) -> None:
    parser = command(
        "doctor",
        run,
        "Show what is installed, and what serves each operation.",
        "Long notes are folded to the width of the terminal, or to 100 columns.",
        example="effasr doctor --recipe small",
    )
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="also show what this machine can do for a recipe, such as record CUDA graphs, and "
        "why not: a YAML file, or the name of a recipe",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="path.to.field=value",
        help="a field of the recipe to change, as for train",
    )


def run(options: argparse.Namespace) -> int:
    with working("trying each backend of each operation"):
        # The report imports torch, for which --help must not wait.
        from effasr.cli.installation.report import Report, recipe_rows, report

        rows = recipe_rows(options.recipe, options.overrides)
        text = Report((*report().rows, *rows)).text()
    print_line(text)
    return 0
