"""Every command in README.md and docs/ is one that exists, with its options.

The words after ``sh`` that open a block say why no test runs its commands (``gpu``, ``download``,
``long``), or where `tests/docs/test_run_blocks.py` runs them (``run``, ``run trained``,
``run chat``, ``run whisper``).
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun

from effasr import config
from effasr.cli import main as cli
from effasr.data.manifest import nemo
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import ReadOptions
from effasr.training.config import TrainConfig
from tests.docs.scripts import ROOT, run

PAGES = [
    ROOT / "README.md",
    *(ROOT / "kernels/README.md", ROOT / "CONTRIBUTING.md", ROOT / "csrc/README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
]
NEEDS = {"gpu", "download", "long", "run", "run trained", "run chat", "run whisper"}
ELSEWHERE = {"arecord", "find", "head", "hf", "sed", "tail", "tensorboard"}
"""Programs of others, whose options are not checked."""
PLACEHOLDER = "demo"
"""The recipe that stands for RECIPE, and for one that the reader has yet to write."""


def blocks(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """The code blocks of a language: what the words after it say, and the text."""
    result = re.findall(rf"^```{language}\b *([^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S)
    yield from result


def split(line: str) -> list[list[str]]:
    """The commands of a line, without comments, prompts, pipes and assignments before them."""
    line = line.split("  #")[0].split(" # ")[0]
    commands = []
    for part in re.split(r"&&|\|", line):
        words = shlex.split(part)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            commands.append(words)
    return commands


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """All commands in blocks, and those in the text that name a program of ours."""
    result = [
        (line, words)
        for _, text in blocks(page, "sh")
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
        for words in split(line)
    ]
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for text in re.findall(r"`((?:effasr|python|torchrun|make|pytest) [^`]+)`", prose):
        text = " ".join(text.split())
        result += [(text, words) for words in split(text) if "..." not in words]
    return result


COMMANDS = [
    pytest.param(words, id=f"{page.relative_to(ROOT)}: {line[:70]}")
    for page in PAGES
    for line, words in commands_of(page)
]


def check_training(recipe: str, overrides: list[str]) -> None:
    existing = recipe if recipe in config.recipes() else PLACEHOLDER
    assert existing == recipe or recipe == "RECIPE" or Path(recipe).suffix == ".yaml", recipe
    provided = [item for item in overrides if item not in ("field=value", "...")]
    config.load(TrainConfig, existing, provided)


def check_effasr(words: list[str]) -> None:
    if len(words) == 1 and "|" not in words[0]:
        # In the text a command may be named without its arguments.
        (parsers,) = (a for a in cli.build_parser()._actions if a.dest == "command")
        assert words[0] in parsers.choices
        return
    options = cli._parse(cli.build_parser(), words)
    if options.command in ("train", "calibrate"):
        check_training(options.recipe, options.overrides)


def check_torchrun(words: list[str]) -> None:
    words = ["2" if word == "N" else word for word in words]
    options = torchrun.get_args_parser().parse_args(words)
    script = options.training_script
    if not options.training_script_args:
        assert script == "effasr/train.py"
        return
    assert script == "effasr.train" if options.module else (ROOT / script).is_file(), script
    check_training(options.training_script_args[0], options.training_script_args[1:])


class _Read(Exception):
    """The command line has been read."""


def check_python(words: list[str]) -> None:
    """Run a script until it has read its command line."""
    if words[0] == "setup.py":
        return
    assert (ROOT / words[0]).is_file(), words[0]

    def reading(read: Callable[..., Any]) -> Callable[..., None]:
        def alone(*given: Any) -> None:
            read(*given)
            raise _Read

        return alone

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            read = getattr(argparse.ArgumentParser, name)
            patch.setattr(argparse.ArgumentParser, name, reading(read))
        try:
            code = run(*words)
        except _Read:
            return
    assert (code, "--help" in words) == (0, True), words


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    for word in words:
        name, equals, _ = word.partition("=")
        assert f"$({name})" in makefile if equals else name in targets.split(), word


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for names in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(names.split(",")) <= set(extras["optional-dependencies"])


def check_pytest(words: list[str]) -> None:
    assert any((ROOT / word).exists() for word in words)
    assert all((ROOT / word).exists() for word in words if word.startswith("tests"))


def check_sbatch(words: list[str]) -> None:
    assert any((ROOT / word).is_file() for word in words)


CHECKS = {
    "effasr": check_effasr,
    "torchrun": check_torchrun,
    "python": check_python,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "sbatch": check_sbatch,
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_exists_with_its_options(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *arguments = words
    if program in ELSEWHERE:
        return
    if program in CHECKS:
        CHECKS[program](arguments)
        return
    script = ROOT / program
    assert script.is_file(), program
    assert script.stat().st_mode & 0o111, program


def test_the_commands_of_every_page_are_found():
    assert len(COMMANDS) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_commands_is_marked(page):
    """Those that are not run are marked with what they need."""
    programs = "|".join(CHECKS)
    for language, needs, text in re.findall(
        r"^```(\w*) *([^\n]*)\n(.*?)^```", page.read_text(), re.M | re.S
    ):
        if language == "sh":
            assert needs in NEEDS, text
        else:
            assert not re.search(rf"^({programs}) ", text, re.M), text


YAML = [(page.name, text) for page in PAGES for _, text in blocks(page, "yaml")]


@pytest.mark.parametrize("text", [text for _, text in YAML], ids=[name for name, _ in YAML])
def test_a_part_of_a_recipe_is_valid(text, tmp_path):
    (tmp_path / "part.yaml").write_text(text)
    config.load(TrainConfig, tmp_path / "part.yaml")


def test_the_line_of_a_manifest_is_read():
    ((_, text),) = blocks(ROOT / "README.md", "json")
    utterance = nemo.parse(ManifestRow.parse(text, ROOT / "train.jsonl", 1), ReadOptions())
    assert (utterance.duration, utterance.text) == (4.2, "Good morning.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_in_python_run(page):
    """In their order: a later one may go on with what an earlier one has made."""
    names: dict[str, Any] = {}
    for _, text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), names)
