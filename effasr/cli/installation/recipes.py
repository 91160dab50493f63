"""``effasr recipes``: lists, shows and copies the recipes that come with effasr."""

import argparse
import itertools
import textwrap
from pathlib import Path

from effasr import config
from effasr.cli.options import AddCommand, print_line


def add(command: AddCommand) -> None:
    parser = command(
        "recipes",
        run,
        "List the recipes, show one, or copy one to change it.",
        "Without an action, it lists them. `copy` never overwrites a file, and writes the name of",
        "the new file as the name of the run.",
        example="effasr recipes copy small smaller.yaml",
    )
    parser.add_argument(
        "action_name",
        nargs="?",
        choices=("list", "show", "copy"),
        default="list",
        metavar="ACTION",
        help="list (the default), show or copy",
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe to show or copy")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="file to write (default: RECIPE.yaml)",
    )


def run(options: argparse.Namespace) -> int:
    action, recipe, file = options.action_name, options.recipe, options.file
    if (file is not None and action != "copy") or (recipe is not None and action == "list"):
        raise ValueError(
            f"`{action}` must have no further arguments than RECIPE for show, and RECIPE and FILE "
            f"for copy, but has {' '.join(map(str, filter(None, (recipe, file))))!r}."
        )
    if action == "list":
        for name in config.recipes():
            print_line(describe(name))
        return 0
    if recipe is None or recipe not in config.recipes():
        names = ", ".join(config.recipes())
        problem = "is missing" if recipe is None else f"is {recipe!r}"
        raise ValueError(f"`RECIPE` must be one of {names} for {action}, but {problem}.")
    if action == "show":
        print_line(read(recipe))
    else:
        copy(recipe, file or Path(f"{recipe}.yaml"))
    return 0


def copy(recipe: str, file: Path) -> None:
    """Write a recipe to a new file, whose name becomes that of the run."""
    from effasr.data.atomic_files import write_atomically
    from effasr.untrusted.documents import dump_scalar

    if file.suffix not in (".yaml", ".yml") or file.exists():
        raise ValueError(
            f"`FILE` must be a new file that ends in .yaml, but is {str(file)!r}: name another "
            "one, or remove it."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    text = read(recipe).replace(f"name: {recipe}\n", f"name: {dump_scalar(file.stem)}\n", 1)
    write_atomically(file, text.encode())
    print_line(f"wrote {file}; train it with `effasr train {file}` (results in runs/{file.stem})")


def describe(recipe: str) -> str:
    """The name of a recipe, and the first sentence of the comment at the top of its file."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), read(recipe).splitlines())
    sentence = " ".join(line.lstrip("# ") for line in comment).split(". ")[0].rstrip(".")
    return textwrap.fill(sentence, 80, initial_indent=f"  {recipe:18} ", subsequent_indent=" " * 21)


def read(recipe: str) -> str:
    return (config.RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")
