"""``effasr doctor``: shows what is installed, and what serves each operation."""

from __future__ import annotations

import argparse

from effasr.cli.options import AddCommand, print_line
from effasr.cli.progress import working


def add(command: AddCommand) -> None:
    """Add the command to the parser."""
    command(
        "doctor",
        run,
        "Show what is installed, and what serves each operation.",
        "Long notes are folded to the width of the terminal, or to 100 columns.",
        example="effasr doctor",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    with working("trying each backend of each operation"):
        # The report imports torch, for which --help must not wait.
        from effasr.cli.installation.report import report

        text = report().text()
    print_line(text)
    return 0
