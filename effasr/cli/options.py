"""Options and terminal output that several commands share.

The modules of the commands import nothing heavy at the top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from effasr.cli.progress import ERASE, erase_line, working
from effasr.untrusted.display import display_width, escape_controls, fold

if TYPE_CHECKING:
    import torch

    from effasr.checkpoint import LoadedModel
    from effasr.decoding.config import DecodingConfig

AddCommand = Callable[..., argparse.ArgumentParser]
"""Adds a command: takes its name, its action, its description, lines for the end of its help, and
``example``, a command line that is the last line of the help."""

_LABEL = re.compile(r"\w[\w ]{,18}? {2,}")
"""A name in the first column of a report."""

RUN_HELP = "a run (runs/NAME: its best checkpoint), or a model directory"
MANIFEST_HELP = "NeMo JSONL, lhotse cuts, a Kaldi, audio or prepared folder"


def folder(text: str) -> Path:
    """Parse the path of a folder, which need not exist."""
    if os.path.isfile(text):
        raise argparse.ArgumentTypeError(
            f"{text} must be a folder, but is a file: name another folder"
        )
    return Path(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers from ``least`` to 2**31 - 1."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, but is {text!r}")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Parse a duration: 480ms, 0.48s or 0.48."""
    number, scale = text, 1.0
    for unit, size in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            number, scale = text.removesuffix(unit), size
            break
    try:
        found = float(number) * scale
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be seconds above 0, such as 480ms or 0.48, but is {text!r}"
        )
    return found


def add_language(parser: argparse.ArgumentParser) -> None:
    """Add ``--language``, English by default."""
    parser.add_argument(
        "--language",
        default="en",
        metavar="LANG",
        help="language of manifest lines that do not name one (default: en)",
    )


def add_subsampling(parser: argparse.ArgumentParser) -> None:
    """Add ``--subsampling``; None where it is not given."""
    parser.add_argument(
        "--subsampling",
        type=int,
        choices=(4, 8),
        help="model.encoder.subsampling of the model to train, for the frames per token "
        "(default: 8)",
    )


def add_recipe(parser: argparse.ArgumentParser, recipe_help: str, override_help: str) -> None:
    """Add a recipe and its overrides."""
    parser.add_argument("recipe", metavar="RECIPE", help=recipe_help)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="path.to.field=value", help=override_help
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, which `effasr.distributed.process_group.choose_device` reads."""
    parser.add_argument(
        "--device",
        default="auto",
        help="device: auto (the default), cpu, cuda, or cuda:1 for the second GPU",
    )


def add_averaged(parser: argparse.ArgumentParser) -> None:
    """Add ``--averaged``, which `run_checkpoints` reads."""
    parser.add_argument(
        "--averaged",
        type=at_least(1),
        metavar="N",
        help="average of the weights and batch-norm statistics of the last N checkpoints of the "
        "run, in place of the best checkpoint",
    )


def run_checkpoints(options: argparse.Namespace) -> list[Path]:
    """Return the model directories to average: the best of the run, or the last ``--averaged``.

    Raises:
        ValueError: There is no model, or the run has fewer checkpoints.
    """
    from effasr.checkpoint import resolve
    from effasr.training.checkpointing.averaging import newest_checkpoints

    if options.averaged is None:
        return [resolve(options.run)]
    return newest_checkpoints(options.run, options.averaged)


def load_average(checkpoints: list[Path], device: torch.device) -> LoadedModel:
    """Return the average of model directories, on a device; one is read as it is."""
    from effasr.checkpoint import load_model
    from effasr.training.checkpointing.averaging import average

    with working("loading the model"):
        if len(checkpoints) == 1:
            return load_model(checkpoints[0], device)
        loaded = average(checkpoints)
        loaded.model.to(device)
        return loaded


def add_beam(parser: argparse.ArgumentParser, result: str) -> None:
    """Add ``--beam``; ``result`` is what each search finds."""
    parser.add_argument(
        "--beam",
        type=at_least(1),
        default=1,
        metavar="N",
        help=f"hypotheses of each {result} in beam search (default: 1, greedy)",
    )


def add_decoding(parser: argparse.ArgumentParser, *, beam: int = 1) -> None:
    """Add the options that `decoding_config` reads; ``beam`` is the default of ``--beam``.

    Those that ``--decoding`` may set are None where they are not given.
    """
    add_device(parser)
    parser.set_defaults(default_beam=beam)
    parser.add_argument(
        "--decoding",
        type=Path,
        metavar="FILE.yaml",
        help="file of `effasr tune`; options of the search that are given have precedence",
    )
    parser.add_argument(
        "--method",
        choices=("auto", "attention", "transducer", "ctc", "language_model"),
        metavar="METHOD",
        help="decoding method: attention, transducer, ctc, language_model, or auto (the default) "
        "for the first of these that the model has",
    )
    greedy = ", greedy" if beam == 1 else ""
    parser.add_argument(
        "--beam",
        type=at_least(1),
        metavar="N",
        help=f"hypotheses of each utterance in beam search (default: {beam}{greedy})",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="exponent of the length in the score of the attention decoder with --beam: 0 for the "
        "likeliest transcript, more for longer ones (default: 0.6)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=float,
        metavar="B",
        help="weight of the share of frames that a transcript attends to, with --beam and the "
        "attention decoder; more leaves out less speech (default: 0)",
    )
    parser.add_argument(
        "--ctc-weight",
        type=float,
        metavar="W",
        help="share of CTC in the scores of the attention decoder, 0 to 1; needs both (default: 0)",
    )
    parser.add_argument(
        "--no-repeat-ngram",
        type=at_least(2),
        metavar="N",
        help="length of token sequences that the attention decoder never repeats, which ends loops "
        "(default: all repetitions are allowed)",
    )
    parser.add_argument(
        "--lm",
        type=Path,
        metavar="FILE",
        help="language model over token ids for the attention decoder or a beam of CTC: n-grams "
        "(ARPA, plain or .gz), or the folder of a causal language model of transformers",
    )
    parser.add_argument(
        "--lm-unit",
        choices=("token", "word"),
        help="unit of the n-grams in --lm: token ids (the default), or words, which are scored "
        "when they end",
    )
    parser.add_argument(
        "--lm-weight",
        type=float,
        metavar="W",
        help="weight of the language model in the score (default: 0.3)",
    )
    parser.add_argument(
        "--instruction",
        default="Transcribe the speech.",
        metavar="TEXT",
        help="instruction for a speech language model (default: Transcribe the speech.)",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=2.0,
        metavar="S",
        help="skip stretches without speech of this many seconds or more (default: 2; 0 for none)",
    )
    parser.add_argument(
        "--frame-budget",
        type=at_least(1),
        default=4096,
        metavar="N",
        help="audio to decode together, in frames of 80 ms (default: 4096); less needs less memory",
    )


def add_nbest(parser: argparse.ArgumentParser) -> None:
    """Add ``--nbest``; None where it is not given."""
    parser.add_argument(
        "--nbest",
        type=at_least(1),
        metavar="N",
        help="also write the N best texts of each utterance with their scores, as JSON; N is at "
        "most --beam",
    )


def add_second_pass(parser: argparse.ArgumentParser) -> None:
    """Add ``--second-lm`` and its weights."""
    parser.add_argument(
        "--second-lm",
        type=Path,
        metavar="LM",
        help="language model which chooses among the --nbest texts of each segment (default of "
        "--nbest then: --beam): folder of a causal language model of transformers with a tokenizer "
        "of its own, or n-grams over words (ARPA, plain or .gz)",
    )
    parser.add_argument(
        "--second-lm-weight",
        type=float,
        metavar="W",
        help="weight of the second language model in the ranking (default: 0.3)",
    )
    parser.add_argument(
        "--second-word-bonus",
        type=float,
        metavar="B",
        help="bonus for each word with --second-lm (default: 0)",
    )


def add_corrector(parser: argparse.ArgumentParser) -> None:
    """Add ``--corrector``, its margin and its source."""
    parser.add_argument(
        "--corrector",
        type=Path,
        metavar="RUN",
        help="run of the recipe corrector, which reads the --nbest texts of each segment (default "
        "of --nbest then: --beam) and writes the text",
    )
    parser.add_argument(
        "--corrector-margin",
        type=float,
        metavar="M",
        help="keep the text of the search unless the corrector's is likelier by more than M nats "
        "(default: 2)",
    )
    parser.add_argument(
        "--corrector-source",
        metavar="NAME",
        help="source whose experts the corrector uses, where it has experts for each `source` of "
        "its training data (default: the only one)",
    )


def add_confidence(parser: argparse.ArgumentParser) -> None:
    """Add ``--confidence`` and ``--calibration``."""
    parser.add_argument(
        "--confidence",
        action="store_true",
        help="also compute the confidence of each word, from the entropy of the model's "
        "distributions",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="calibration.json of an evaluation of a dev set, which makes the confidences of "
        "--confidence probabilities",
    )


def decoding_config(options: argparse.Namespace, *, words: bool = False) -> DecodingConfig:
    """Return the decoding configuration that the options of `add_decoding` ask for.

    Those of `add_nbest`, `add_second_pass`, `add_corrector` and `add_confidence` count as well,
    where the command has them. What is not given comes from the file of ``--decoding``, if there is
    one.
    """
    from effasr.decoding.config import DecodingConfig
    from effasr.evaluation.tuning.decoding_file import read_decoding

    names = (
        *("method", "beam", "length_penalty", "coverage_penalty", "ctc_weight"),
        *("no_repeat_ngram", "lm", "lm_unit", "lm_weight"),
        *("second_lm", "second_lm_weight", "second_word_bonus"),
        *("corrector", "corrector_margin", "corrector_source"),
    )
    given = {name: getattr(options, name, None) for name in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    if options.decoding is not None:
        chosen = read_decoding(options.decoding, chosen)
    chosen.setdefault("beam", options.default_beam)
    nbest = getattr(options, "nbest", None)
    if nbest is None and ("second_lm" in chosen or "corrector" in chosen):
        nbest = chosen["beam"]
    return DecodingConfig(
        **chosen,
        instruction=options.instruction,
        frame_budget=options.frame_budget,
        gap_seconds=options.gap or None,
        nbest=nbest,
        word_confidence=getattr(options, "confidence", False),
        calibration=getattr(options, "calibration", None),
        words=words,
    )


def print_line(text: str) -> None:
    """Write to standard output, with one line feed at the end."""
    if sys.stdout.isatty():
        erase_line()
    sys.stdout.write(escape_controls(text.rstrip("\n")) + "\n")


def print_folded(text: str) -> None:
    """Write lines to standard output, on a terminal folded between words to its width.

    Rows of tables and lines that begin with a space, such as commands to copy, stay whole.
    """
    width = display_width()
    if width is None:
        print_line(text)
        return
    lines = []
    for line in escape_controls(text.rstrip("\n")).split("\n"):
        label = _LABEL.match(line)
        indent = " " * (label.end() if label else 2)
        lines += [line] if line.startswith((" ", "|")) else fold(line, width, indent)
    print_line("\n".join(lines))


def log(command: str, text: str) -> None:
    """Write a line to standard error, after the name of the command."""
    # One write, so that a line of progress of another thread does not come between.
    erased = ERASE if sys.stderr.isatty() else ""
    sys.stderr.write(f"{erased}effasr {command}: {escape_controls(text)}\n")
    sys.stderr.flush()
