"""The command ``effasr``; also ``python -m effasr.cli``.

What the commands do is in `effasr.cli.commands`. Errors go to standard error as one line. Exit
codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import itertools
import logging
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from effasr import config
from effasr.cli import calibrate, commands, compare, export, plan, transcribe
from effasr.cli.options import RUN_HELP, add_decoding, at_least, folder

_BAD_INPUT = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_BAD_PATH = {errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}
"""Where the path that was given is at fault as well, and not, say, a full disk."""

_PATIENCE_S = 3.0
"""How long a process leaves it to another of the same run to say what went wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = build_parser()
    options = _parse(parser, arguments)
    if options.version:
        sys.stdout.write(f"effasr {importlib.metadata.version('effasr')}\n")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    logging.basicConfig(format=f"effasr {options.command}: %(message)s", level=logging.WARNING)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has enough: so be it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _BAD_INPUT as error:
        return _fail(options.command, error, code=2)
    except OSError as error:
        return _fail(options.command, error, code=2 if error.errno in _BAD_PATH else 1)
    except (RuntimeError, ImportError) as error:
        return _fail(options.command, error, code=getattr(error, "exit_code", 1))


def _run(options: argparse.Namespace) -> int:
    from effasr_kernels import allow_reference_on_gpu

    # What no kernel serves yet runs all the same, and says so once for each operation.
    before = allow_reference_on_gpu()
    try:
        code = options.action(options)
    finally:
        allow_reference_on_gpu(before)
    sys.stdout.flush()
    return code


def _fail(command: str, error: Exception, code: int) -> int:
    from effasr.distributed.failures import PeerFailed, write_torchrun_error

    if os.environ.get("EFFASR_TRACEBACK"):
        traceback.print_exc()
    text = _explain(error)
    write_torchrun_error(text)
    if isinstance(error, PeerFailed):
        # torchrun ends all processes when one has ended: not before the other has spoken.
        time.sleep(_PATIENCE_S)
    else:
        sys.stderr.write(f"effasr {command}: {text}\n")
    return code


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, and of the processes of a node in one alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        silent = "LOCAL_WORLD_SIZE" in os.environ and int(os.environ.get("LOCAL_RANK", 0))
        self.exit(2, None if silent else f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options, rest = parser.parse_known_args(arguments)
    if options.command in ("train", "calibrate"):
        # --path.to.field=value, as other trainers want it, is as good.
        options.overrides = [*options.overrides, *rest]
    elif rest:
        getattr(options, "parser", parser).error(f"there is no {' '.join(rest)}")
    return options


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="effasr",
        usage="effasr [-h] [--version] COMMAND ...",
        description="Train speech models without padding, evaluate them and transcribe.",
        epilog="Errors are one line; with EFFASR_TRACEBACK=1 they say where they come from, too.\n"
        "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="effasr", help=argparse.SUPPRESS
    )
    described = [parser.description, "", "commands:"]

    def command(name: str, action: Callable[..., int], text: str, *epilog: str) -> _Parser:
        made = parsers.add_parser(name, description=text, epilog="\n".join(epilog))
        made.set_defaults(action=action, parser=made)
        described.append(f"  {name:11} {text}")
        return made

    _add_data_commands(command)
    plan.add(command)
    calibrate.add(command)
    _add_train(command)
    _add_evaluate(command)
    compare.add(command)
    transcribe.add(command)

    one = command(
        "import",
        commands.import_,
        "Make a model directory of NeMo's or Hugging Face's model.",
        "A .nemo file may hold a FastConformer with CTC, a transducer (RNN-T or TDT) or both, or a",
        "Canary; NeMo need not be installed. What is trained otherwise here is named.",
    )
    one.add_argument(
        "source",
        type=Path,
        metavar="MODEL",
        help="a .nemo file; or a folder with config.json, model.safetensors, tokenizer.json",
    )
    one.add_argument("out", type=folder, metavar="OUT", help="the model directory to write")

    export.add(command)
    command("doctor", commands.doctor, "Show what is installed, and what serves each operation.")
    parser.description = "\n".join(described)
    return parser


_MANIFEST_HELP = "NeMo JSONL, lhotse cuts, a Kaldi, audio or prepared folder"
_LANGUAGE_HELP = "of lines that name none (default: en)"


def _add_data_commands(command: Callable[..., _Parser]) -> None:
    one = command("prepare", commands.prepare, "Check recordings and transcripts before training.")
    one.add_argument("source", type=Path, metavar="SOURCE", help=_MANIFEST_HELP)
    one.add_argument(
        "out", type=folder, metavar="OUT", help="folder for the cuts, and what was dropped and why"
    )
    one.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="also check the texts against it"
    )
    one.add_argument("--language", default="en", metavar="LANG", help=_LANGUAGE_HELP)
    one.add_argument(
        "--jobs",
        type=at_least(1),
        default=4,
        metavar="N",
        help="files read at a time (default: 4)",
    )

    one = command(
        "tokenizer",
        commands.tokenizer,
        "Train a tokenizer: one SentencePiece model for each language.",
    )
    one.add_argument(
        "manifests", type=Path, nargs="+", metavar="MANIFEST", help="whose texts to learn from"
    )
    one.add_argument("out", type=folder, metavar="OUT", help="folder for the tokenizer")
    one.add_argument("--language", default="en", metavar="LANG", help=_LANGUAGE_HELP)
    one.add_argument(
        "--vocab-size",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="pieces of each language (default: 1024)",
    )
    one.add_argument("--model-type", choices=("unigram", "bpe"), default="bpe", help="default: bpe")

    one = command(
        "demo-data", commands.demo_data, "Synthesise a small speech corpus, without any download."
    )
    one.add_argument("out", type=folder, metavar="OUT", help="folder for recordings and manifests")
    one.add_argument(
        "--multilingual", action="store_true", help="English, German, and German to English"
    )
    one.add_argument(
        "--utterances",
        type=at_least(8),
        default=4000,
        metavar="N",
        help="recordings to train on (default: 4000)",
    )


def _add_train(command: Callable[..., _Parser]) -> None:
    one = command(
        "train",
        commands.train,
        "Train, or go on training: the same command resumes an interrupted run.",
        "On several GPUs: torchrun --nproc-per-node N effasr/train.py RECIPE ...",
        "",
        "recipes:",
        *(_describe(recipe) for recipe in config.recipes()),
    )
    one.add_argument("recipe", metavar="RECIPE", help="a YAML file, or one of those below")
    one.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="path.to.field=value",
        help="a field to change, such as training.max_steps=1000; later ones win",
    )
    one.add_argument(
        "--show", action="store_true", help="show every field and its value, and do not train"
    )


def _describe(recipe: str) -> str:
    """The name of a recipe, and the first sentence of the comment that it begins with."""
    comment = itertools.takewhile(
        lambda line: line.startswith("#"),
        (config.RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines(),
    )
    sentence = " ".join(line.lstrip("# ") for line in comment).split(". ")[0].rstrip(".")
    return textwrap.fill(sentence, 80, initial_indent=f"  {recipe:18} ", subsequent_indent=" " * 21)


def _add_evaluate(command: Callable[..., _Parser]) -> None:
    one = command(
        "evaluate", commands.evaluate, "Transcribe a manifest and count the errors, by language."
    )
    one.add_argument("--run", type=Path, required=True, help=RUN_HELP)
    one.add_argument("--manifest", type=Path, required=True, help=_MANIFEST_HELP)
    one.add_argument(
        "--language",
        metavar="LANG",
        help="of lines that name none (default: what the model was trained on most)",
    )
    one.add_argument(
        "--normalizer",
        default="basic",
        help="of both texts before they are compared: none, basic (lower case, no punctuation; "
        "the default), whisper_english or open_asr_leaderboard_v1",
    )
    one.add_argument(
        "--output",
        type=folder,
        metavar="FOLDER",
        help="for wer.json and hypotheses.jsonl (default: RUN/evaluation/SET; nowhere for a model "
        "directory)",
    )
    one.add_argument(
        "--worst",
        type=at_least(0),
        default=5,
        metavar="N",
        help="utterances with the most errors to show (default: 5)",
    )
    add_decoding(one)


if __name__ == "__main__":
    sys.exit(main())
