"""Options and terminal output that several commands share.

The modules of the commands import nothing heavy at the top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from effasr.cli.progress import ERASE, erase_line, progress_counter, working
from effasr.decoding.config import LONG_FORM, SEARCH, SECOND_PASS, DecodingConfig
from effasr.untrusted.display import display_width, escape_controls, fold
from effasr.untrusted.remote import shown

if TYPE_CHECKING:
    from lhotse.cut import Cut

    from effasr.checkpoint import LoadedModel
    from effasr.data.prompt import Prompt
    from effasr.transcription.results import Failure

# Adds a command: takes its name, its action, its description, lines for the end of its help, and
# ``example``, a command line that is the last line of the help.
AddCommand = Callable[..., argparse.ArgumentParser]

_LABEL = re.compile(r"\w[\w ]{,18}? {2,}")  # a name in the first column of a report

RUN_HELP = "a run (runs/NAME: its best checkpoint), or a model directory"
MANIFEST_HELP = "NeMo JSONL, lhotse cuts, tar files, a folder (Kaldi, audio, prepared ...)"

# Fields of `DecodingConfig` that some commands have as options, beside its SEARCH and _RECORDINGS.
NBEST = ("nbest",)
CONFIDENCE = "word_confidence", "calibration"
_RECORDINGS = (
    *("instruction", "gap_seconds", "chunk_seconds", "vad", "no_speech", "fallback"),
    *("fallback_confidence", "frame_budget", "precision", "attention"),
)
_TITLES = {
    "recordings and batches": (*_RECORDINGS, *LONG_FORM),
    "second pass": SECOND_PASS,
}


def folder(text: str) -> Path:
    if os.path.isfile(text):
        raise argparse.ArgumentTypeError(
            f"{text} must be a folder, but is a file: name another folder"
        )
    return Path(text)


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, but is {text!r}")
        return int(text)

    return number


def fraction(text: str) -> float:
    """Parse a share from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to 1, but is {text!r}")
    return value


def seconds(text: str) -> float:
    """Parse a duration: 480ms, 0.48s or 0.48."""
    number, scale = text, 1.0
    for unit, size in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            number, scale = text.removesuffix(unit), size
            break
    try:
        result = float(number) * scale
    except ValueError:
        result = math.nan
    if not 0 < result < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be seconds above 0, such as 480ms or 0.48, but is {text!r}"
        )
    return result


def add_positional(
    parser: argparse.ArgumentParser,
    name: str,
    metavar: str,
    text: str,
    *,
    kind: Callable[[str], Any] = Path,
    many: bool = False,
    required: bool = False,
    option: bool = True,
) -> None:
    """Add an argument that `place_positionals` reads, also from an option of its name."""
    parser.add_argument(name, nargs="*" if many else "?", metavar=metavar, help=text)
    if option:
        count = "+" if many else None
        dest = f"{name}_option"
        parser.add_argument(
            f"--{name}", dest=dest, nargs=count, metavar=metavar, help=argparse.SUPPRESS
        )
    placed = parser.get_default("positionals") or {}
    parser.set_defaults(positionals={**placed, name: (metavar, kind, many, required)})


def place_positionals(options: argparse.Namespace, remaining: Sequence[str]) -> list[str]:
    """Give arguments their names, and return those that have none.

    argparse gives the second one no value where an option stands before it.
    """
    words: list[str] = []
    for name in options.positionals:
        value = getattr(options, name)
        words += value if isinstance(value, list) else [] if value is None else [value]
    words += [word for word in remaining if word == "-" or not word.startswith("-")]
    missing = []
    for name, (metavar, kind, many, required) in options.positionals.items():
        value = getattr(options, f"{name}_option", None)
        if value is None:
            value, words = (words, []) if many else (words[0] if words else None, words[1:])
        if required and value is None:
            missing.append(metavar)
        if value is not None:
            value = [kind(word) for word in value] if many else kind(value)
        setattr(options, name, value)
    if missing:
        options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    return [*(word for word in remaining if word != "-" and word.startswith("-")), *words]


def group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the group of options with a title, which the first call adds."""
    for item in parser._action_groups:
        if item.title == title:
            return item
    return parser.add_argument_group(title)


def add_language(
    parser: argparse._ActionsContainer,
    text: str = "language of manifest lines that do not name one",
    *,
    default: str | None = None,
) -> None:
    """Add ``--language``; None for what the model was trained on most."""
    shown = default or "what the model was trained on most"
    parser.add_argument(
        "--language", default=default, metavar="LANG", help=f"{text} (default: {shown})"
    )


def add_prompt(
    parser: argparse.ArgumentParser, text: str = "language of manifest lines that do not name one"
) -> None:
    """Add the options that `with_prompt_options` reads, and ``--language``."""
    languages = group(parser, "languages")
    add_language(languages, f"{text}, or auto: that which is heard")
    languages.add_argument(
        "--target-language",
        metavar="LANG",
        help="language of the text; translates if it differs from the spoken language",
    )
    languages.add_argument(
        "--punctuation",
        action=argparse.BooleanOptionalAction,
        help="ask for punctuation and capitals, or for plain text (default: as the manifest says, "
        "else as trained)",
    )


def with_prompt_options(prompt: Prompt, options: argparse.Namespace) -> Prompt:
    """Return the prompt of a recording with the changes that the options ask for."""
    target = options.target_language or prompt.target
    return prompt.stating(target=target, punctuation=options.punctuation)


def add_subsampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--subsampling",
        type=int,
        choices=(4, 8),
        help="model.encoder.subsampling of the model to train, for the frames per token "
        "(default: that of the model whose tokenizer is named, else 8)",
    )


def add_recipe(parser: argparse.ArgumentParser, recipe_help: str, override_help: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=recipe_help)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="path.to.field=value", help=override_help
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="device: auto (the default), cpu, cuda, or cuda:1 for the second GPU",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    model = group(parser, "model")
    model.add_argument(
        "--averaged",
        type=at_least(1),
        metavar="N",
        help="average of the weights and batch-norm statistics of the last N checkpoints of the "
        "run, in place of the best checkpoint",
    )
    model.add_argument(
        "--window",
        type=seconds,
        metavar="S",
        help="seconds to which a Whisper hears silence behind speech, in place of the 30 of its "
        "training: 10 is faster, with other errors (see docs/finetuning.md)",
    )


def load_checkpoints(options: argparse.Namespace) -> tuple[LoadedModel, list[Path]]:
    """Load the best checkpoint of ``--run``, or the average of the last ``--averaged``."""
    from effasr.distributed.process_group import choose_device
    from effasr.training.checkpointing.averaging import load_run

    with working("loading the model"):
        loaded, paths = load_run(options.run, options.averaged, choose_device(options.device))
        if options.window is not None:
            loaded = loaded.with_window(options.window)
    return loaded, paths


def assumes_language(options: argparse.Namespace, loaded: LoadedModel) -> bool:
    """Whether a model is told languages, but ``--language`` does not name one."""
    is_told = loaded.model.config.is_told_language(loaded.tokenizer.sources)
    return options.language is None and is_told


def read_cuts(options: argparse.Namespace, loaded: LoadedModel) -> tuple[list[Cut], list[Failure]]:
    """Read ``--manifest`` with `add_prompt`'s options."""
    from effasr.data.manifest.cuts import prompt_of, with_prompt
    from effasr.data.prompt import warn_assumed
    from effasr.evaluation.evaluate import openable_cuts

    prompt = loaded.prompt.stating(options.language)
    with progress_counter("utterances read") as show:
        cuts, failures, assumed = openable_cuts(options.manifest, prompt=prompt, progress=show)
    if assumes_language(options, loaded):
        warn_assumed(assumed, len(cuts), prompt.source, "give `--language`")
    changed = [with_prompt(cut, with_prompt_options(prompt_of(cut), options)) for cut in cuts]
    return changed, failures


def add_fields(parser: argparse._ActionsContainer, *names: str) -> None:
    """Add an option for each of these fields of `DecodingConfig`; None where it is not given.

    The type of the field decides what is parsed; its help is the first sentence of its text in the
    docstring, where the names of other options are those of the fields.
    """
    hints, texts = get_type_hints(DecodingConfig), attribute_texts(DecodingConfig)
    by_name = {field.name: field for field in fields(DecodingConfig)}

    def flag(name: str) -> str:
        return "--" + (by_name[name].metadata.get("option") or name).replace("_", "-")

    for name in names:
        kind = next((item for item in get_args(hints[name]) if item is not NoneType), hints[name])
        sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", texts[name])[0].removesuffix(".")
        sentence = re.sub("``(\\w+)``", lambda match: flag(match[1]), sentence)
        parsing: dict[str, Any] = {"action": "store_true", "default": None}
        if by_name[name].default is True:
            parsing["action"] = argparse.BooleanOptionalAction
        if kind is not bool:
            metavar = {int: "N", Path: "FILE", str: "TEXT"}.get(kind)
            metavar = by_name[name].metadata.get("metavar", metavar)
            parsing = {"type": at_least(1) if kind is int else kind, "metavar": metavar}
        if get_origin(hints[name]) is Literal:
            parsing |= {"type": str, "choices": get_args(hints[name])}
        help_text = sentence[0].lower() + sentence[1:]
        parser.add_argument(flag(name), dest=name, help=help_text, **parsing)


def attribute_texts(config: type) -> dict[str, str]:
    """Return the text of each field in the section ``Attributes`` of a docstring."""
    _, _, section = (inspect.getdoc(config) or "").partition("\nAttributes:\n")
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)
    }


def add_decoding(parser: argparse.ArgumentParser, *groups: Sequence[str], beam: int = 1) -> None:
    """Add the options that `decoding_config` reads; ``beam`` is the default of ``--beam``."""
    add_device(parser)
    parser.set_defaults(default_beam=beam)
    group(parser, "search").add_argument(
        "--decoding",
        type=Path,
        metavar="FILE.yaml",
        help="file of `effasr tune`; options of the search that are given have precedence",
    )
    for name in (*SEARCH, *_RECORDINGS, *(name for names in groups for name in names)):
        titles = (title for title, names in _TITLES.items() if name in names)
        add_fields(group(parser, next(titles, "search")), name)
    if beam != 1:
        (action,) = (action for action in parser._actions if action.dest == "beam")
        action.help = str(action.help).replace("default: 1, greedy", f"default: {beam}")


def decoding_config(options: argparse.Namespace) -> DecodingConfig:
    """Return the configuration of `add_decoding`'s options, completed from ``--decoding``."""
    from effasr.evaluation.tuning.decoding_file import read_decoding

    values = {field.name: getattr(options, field.name, None) for field in fields(DecodingConfig)}
    chosen = {name: value for name, value in values.items() if value is not None}
    if options.decoding is not None:
        chosen = read_decoding(options.decoding, chosen)
    chosen.setdefault("beam", options.default_beam)
    if "second_lm" in chosen:
        chosen.setdefault("nbest", chosen["beam"])
    if chosen.get("gap_seconds") == 0:
        chosen["gap_seconds"] = None
    return DecodingConfig(**chosen)


def print_line(text: str) -> None:
    if sys.stdout.isatty():
        erase_line()
    sys.stdout.write(escape_controls(shown(text.rstrip("\n"))) + "\n")


def print_next(*commands: Sequence[str]) -> None:
    """Print the commands that usually follow; words in capitals are for the user to replace."""
    for words in commands:
        print_line(f"next: {shlex.join(['effasr', *words])}")


def print_folded(text: str) -> None:
    """Write lines, on a terminal folded to its width; tables and indented lines stay whole."""
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
    sys.stderr.write(f"{erased}effasr {command}: {escape_controls(shown(text))}\n")
    sys.stderr.flush()
