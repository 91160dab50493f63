"""``effasr completion``: prints a script that completes commands in bash and zsh."""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from effasr import config
from effasr.cli.options import AddCommand, print_line

_SCRIPT = """\
# Completion of effasr for bash and zsh; `effasr completion` wrote it.
[ -n "${{ZSH_VERSION:-}}" ] && autoload -U +X bashcompinit && bashcompinit
_effasr() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {commands} -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    *)
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
        ;;
    esac
    # Files and folders unless a word has been found.
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _effasr effasr
"""
_RECIPES = ("train", "calibrate", "recipes show", "recipes copy")
"""The words after which the name of a recipe is expected."""


def add(command: AddCommand) -> None:
    command(
        "completion",
        run,
        "Print the completion of commands and options, for bash and zsh.",
        "To have it in every shell, add the example to ~/.bashrc or, below compinit, to ~/.zshrc.",
        example='eval "$(effasr completion)"',
    )


def run(options: argparse.Namespace) -> int:
    print_line(script(options.root))
    return 0


def script(parser: argparse.ArgumentParser) -> str:
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    commands: Mapping[str, argparse.ArgumentParser] = subparsers.choices
    recipes = config.recipes()
    values = [_case(after, recipes) for after in _RECIPES if " " in after]
    options = []
    for name, command in commands.items():
        words = [word for action in command._actions for word in action.option_strings]
        for action in command._actions:
            if action.choices and action.option_strings:
                choices = [str(choice) for choice in action.choices]
                values += [_case(f"{name} {option}", choices) for option in action.option_strings]
            elif action.choices:
                words += [str(choice) for choice in action.choices]
        if name in _RECIPES:
            words += recipes
        options.append("    " * 2 + _case(name, words))
    return _SCRIPT.format(
        commands=shlex.quote(" ".join([*commands, "--help", "--version"])),
        values="\n".join(values),
        options="\n".join(options),
    )


def _case(pattern: str, words: Sequence[str]) -> str:
    return f"    {shlex.quote(pattern)}) words={shlex.quote(' '.join(words))} ;;"
