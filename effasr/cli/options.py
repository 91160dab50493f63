"""Options that several commands have, and how their values are checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effasr.decoding.config import DecodingConfig

RUN_HELP = "a run (runs/NAME: its best checkpoint), or a model directory"


def folder(text: str) -> Path:
    """A folder, which need not be there."""
    if os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text} must be a folder, but is a file")
    return Path(text)


def at_least(least: int) -> Callable[[str], int]:
    """A parser of integers."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, but is {text!r}")
        return int(text)

    return number


def add_decoding(one: argparse.ArgumentParser) -> None:
    """Add what `decoding` reads."""
    one.add_argument(
        "--device", default="auto", help="auto (the default), cpu, cuda, or cuda:1 for the second"
    )
    one.add_argument(
        "--method",
        choices=("auto", "attention", "transducer", "ctc"),
        default="auto",
        help="auto (the default): the first of the others that the model has",
    )
    one.add_argument(
        "--beam",
        type=at_least(1),
        default=1,
        metavar="N",
        help="transcripts of an utterance to keep in mind (default: 1, greedy)",
    )
    one.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="with --beam and the attention decoder: 0 for the likeliest transcript, more for "
        "longer ones (default: 0.6)",
    )
    one.add_argument(
        "--coverage-penalty",
        type=float,
        metavar="B",
        help="with --beam and the attention decoder: more for transcripts that leave out less "
        "speech, by the share of frames they attend to (default: 0)",
    )
    one.add_argument(
        "--ctc-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="share of CTC in the scores of the attention decoder, 0 to 1; needs both (default: 0)",
    )
    one.add_argument(
        "--lm",
        type=Path,
        metavar="FILE",
        help="language model over token ids for the attention decoder or a beam of CTC: n-grams "
        "(ARPA, plain or .gz), or the folder of a causal language model of transformers",
    )
    one.add_argument(
        "--lm-weight", type=float, metavar="W", help="of it in the scores (default: 0.3)"
    )
    one.add_argument(
        "--gap",
        type=float,
        default=2.0,
        metavar="S",
        help="do not decode where nobody speaks for so many seconds (default: 2; 0 to decode all)",
    )
    one.add_argument(
        "--frame-budget",
        type=at_least(1),
        default=4096,
        metavar="N",
        help="encoder frames of 80 ms to decode together (default: 4096); fewer need less memory",
    )


def decoding(options: argparse.Namespace, *, words: bool = False) -> DecodingConfig:
    """How to decode."""
    from effasr.decoding.config import DecodingConfig

    return DecodingConfig(
        method=options.method,
        beam=options.beam,
        length_penalty=options.length_penalty,
        coverage_penalty=options.coverage_penalty,
        ctc_weight=options.ctc_weight,
        lm=options.lm,
        lm_weight=options.lm_weight,
        frame_budget=options.frame_budget,
        gap_seconds=options.gap or None,
        words=words,
    )
