"""The command ``effasr``; also ``python -m effasr.cli``.

Each command is a module beside this one. Errors go to standard error as one line. Exit codes: 0
done, 1 failed, 2 bad input, 130 interrupted.
"""

import argparse
import difflib
import errno
import importlib.metadata
import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from effasr.checks import check_urls
from effasr.cli import (
    calibrate,
    compare,
    convert,
    demo_data,
    evaluate,
    init,
    plan,
    prepare,
    report,
    segment,
    tokenizer,
    train,
    transcribe,
    tune,
)
from effasr.cli.conversations import chat
from effasr.cli.installation import completion, doctor, recipes
from effasr.cli.options import AddCommand, place_positionals, print_line
from effasr.cli.untranscribed import label
from effasr.untrusted.display import (
    STANDARD_OUTPUT,
    TerminalFormatter,
    discard_standard_output,
    escape_controls,
    escape_line,
    fold,
    open_standard_streams,
)
from effasr.untrusted.remote import is_url, localized, shown

BAD_INPUT = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_BAD_PATH = {errno.ELOOP, errno.ENAMETOOLONG}
"""Errors that a wrong path causes; others, such as a full disk, are failures."""

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EROFS: "choose a folder that can be written to",
    errno.EMFILE: "raise the limit of open files, such as by `ulimit -n 65536`",
}

_MAX_MESSAGE = 4000
"""Characters of an error that are shown: a value in it may be as long as a file."""

_HELP_COLUMNS = 90
_SCREEN = 40  # lines of a help, above which it names the options without their texts

_PEER_GRACE_S = 3.0
"""Seconds to wait for another process of the run to report the cause of a failure."""


def main(arguments: Sequence[str] | None = None) -> int:
    open_standard_streams()
    # Name a home folder that cannot exist where the user has none: lhotse needs a name.
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = os.devnull
    command = ""
    try:
        parser = build_parser()
        options = _parse(parser, arguments)
        command = options.command or ""
        if options.version or not command:
            if options.version:
                print_line(f"effasr {importlib.metadata.version('effasr')}")
            else:
                parser.print_help()
            sys.stdout.flush()
            return 0
        handler = logging.StreamHandler()
        handler.setFormatter(TerminalFormatter(f"effasr {command}: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
        return _run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has closed it; this is not an error.
        discard_standard_output()
        return 0
    except BAD_INPUT as error:
        return _fail(command, error, code=1 if _is_unwritable(error) else 2)
    except OSError as error:
        if error.filename == STANDARD_OUTPUT:
            discard_standard_output()
        return _fail(command, error, code=2 if error.errno in _BAD_PATH else 1)
    except (RuntimeError, ImportError) as error:
        return _fail(command, error, code=getattr(error, "exit_code", 1))


def _run(options: argparse.Namespace) -> int:
    from effasr_kernels import allow_reference_on_gpu

    # Replace the URLs of what is read by their files in the cache, and refuse others.
    remote = {} if options.command == "init" else _REMOTE
    if options.command in ("import", "prepare"):
        remote = remote | {"source": options.command == "import", "tokenizer": True}
    for name, value in list(vars(options).items()):
        check_urls(name.replace("_", "-"), value, allowed=name in remote)
        if name in remote and isinstance(value, list):
            setattr(options, name, [localized(item, whole=remote[name]) for item in value])
        elif name in remote and is_url(value):
            setattr(options, name, localized(value, whole=remote[name]))
    # Operations without a kernel for the GPU run their reference, with one warning each.
    before = allow_reference_on_gpu()
    try:
        code = options.action(options)
    finally:
        allow_reference_on_gpu(before)
    sys.stdout.flush()
    return code


_REMOTE = {
    **dict.fromkeys(("run", "run_option", "runs", "model", "extend"), True),
    **dict.fromkeys(("manifest", "manifest_option", "manifests"), False),
}
"""Arguments that may be URLs, and whether all files of a folder are read."""


def _fail(command: str, error: Exception, code: int) -> int:
    from effasr.distributed.failures import PeerFailed, write_torchrun_error

    if os.environ.get("EFFASR_TRACEBACK"):
        traceback.print_exc()
    text = shown(explain(error))
    write_torchrun_error(escape_controls(text))
    if isinstance(error, PeerFailed):
        # torchrun ends all processes when one exits: wait until the others have reported their
        # errors.
        time.sleep(_PEER_GRACE_S)
    else:
        sys.stderr.write(f"{f'effasr {command}'.rstrip()}: {escape_controls(text)}\n")
    return code


def _is_unwritable(error: Exception) -> bool:
    """Return whether a permission to write is lacking; without one to read, the input is bad."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return False
    path = Path(os.fsdecode(error.filename))
    readable = path if path.exists() else path.parent
    return os.access(readable, os.R_OK | os.X_OK if readable.is_dir() else os.R_OK)


def explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        name = "" if error.filename is None else f"{escape_line(str(error.filename))}: "
        remedy = "" if error.filename == STANDARD_OUTPUT else _REMEDIES.get(error.errno)
        return f"{name}{error.strerror}{f': {remedy}' if remedy else ''}."
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


class _Parser(argparse.ArgumentParser):
    """Reports an error as one line, and in one process of a node only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **options,
        )
        text = "show this help message and exit"
        # That of all commands has nothing to leave out.
        self.add_argument("-h", "--help", action=_Help, const=self.prog != "effasr", help=text)

    def format_brief(self) -> str:
        """Return the help without the texts of options."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section(None)
        formatter.add_arguments(self._get_positional_actions())
        formatter.end_section()
        lines = [formatter.format_help()]
        for group in self._action_groups:
            shown = [item for item in group._group_actions if item.help != argparse.SUPPRESS]
            if names := [item.option_strings[-1] for item in shown if item.option_strings]:
                lines += [f"{group.title}:", *fold(f"  {', '.join(names)}", _help_width(), "  ")]
        *_, example = str(self.epilog).splitlines()
        lines += ["", f"{self.prog} --help-all explains the options.", "", "example:", example]
        return "\n".join(lines) + "\n"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"{value!r} is no command{_nearest(value, action.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        silent = "LOCAL_WORLD_SIZE" in os.environ and int(os.environ.get("LOCAL_RANK", 0))
        text = escape_line(message)
        self.exit(2, None if silent else f"{self.prog}: {text} (see {self.prog} --help)\n")


class _Help(argparse.Action):
    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **options: object) -> NoReturn:
        text = parser.format_help()
        if self.const and text.count("\n") > _SCREEN:
            assert isinstance(parser, _Parser)
            text = parser.format_brief()
        print_line(text)
        parser.exit()


def _nearest(word: str, words: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(words), n=1)
    return f": did you mean {matches[0]}?" if matches else ""


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        options, remaining = parser.parse_known_args(arguments)
    except SystemExit:
        # After --help.
        sys.stdout.flush()
        raise
    if options.command in ("train", "calibrate"):
        # --path.to.field=value is accepted as well, as in other trainers.
        options.overrides = [*options.overrides, *remaining]
        return options
    at = getattr(options, "parser", parser)
    if getattr(options, "positionals", None):
        remaining = place_positionals(options, remaining)
    if remaining:
        near = _nearest(remaining[0], at._option_string_actions)
        at.error(f"unrecognized arguments: {' '.join(remaining)}{near}")
    return options


# What adds each command, by what it is for.
_COMMANDS: dict[str, tuple[Callable[[AddCommand], None], ...]] = {
    "data": (prepare.add, segment.add, tokenizer.add, plan.add, demo_data.add),
    "training": (init.add, recipes.add, calibrate.add, train.add),
    "results": (evaluate.add, tune.add, compare.add, report.add),
    "use": (transcribe.add, label.add, chat.add),
    "other programs": (convert.add_import, convert.add_export),
    "installation": (completion.add, doctor.add),
}


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="effasr",
        usage="effasr [-h] [--version] COMMAND ...",
        epilog="Errors are one line; with EFFASR_TRACEBACK=1 they have a traceback, too.\n"
        "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="effasr", help=argparse.SUPPRESS
    )
    described = ["Train speech models without padding, evaluate them and transcribe."]

    def command(
        name: str,
        action: Callable[[argparse.Namespace], int],
        text: str,
        *epilog: str,
        example: str = "",
    ) -> argparse.ArgumentParser:
        lines = [*epilog, *([""] if epilog else []), "example:", f"  {example}"]
        added = parsers.add_parser(name, description=_paragraphs([text]), epilog=_paragraphs(lines))
        added.add_argument("--help-all", action=_Help, help="show the whole help and exit")
        added.set_defaults(action=action, parser=added, root=parser)
        described.extend([f"  {name}"] if len(name) > 11 else [])
        # A long name has a line of its own.
        start = "" if len(name) > 11 else name
        described.extend(fold(f"  {start:11} {text}", _help_width(), " " * 14))
        return added

    for title, adders in _COMMANDS.items():
        described += ["", f"{title}:"]
        for add in adders:
            add(command)
    for added in parsers.choices.values():
        added.usage = _usage(added)
    parser.description = "\n".join(described)
    return parser


def _usage(parser: _Parser) -> str:
    words = []
    for action in parser._get_positional_actions():
        word = f"{action.metavar}{' ...' if action.nargs in ('+', '*') else ''}"
        *_, required = (parser.get_default("positionals") or {}).get(
            action.dest, [action.nargs not in ("?", "*")]
        )
        words.append(word if required else f"[{word}]")
    return " ".join(["%(prog)s", *words, "[options]"])


def _paragraphs(lines: Iterable[str]) -> str:
    """Fold paragraphs to the width of the terminal; indented lines, such as examples, stay."""
    folded: list[str] = []
    for whole, group in groupby(lines, lambda line: not line or line.startswith(" ")):
        part = list(group)
        folded += part if whole else fold(" ".join(part), _help_width(), "")
    return "\n".join(folded)


def _help_width() -> int:
    return min(shutil.get_terminal_size().columns, _HELP_COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
