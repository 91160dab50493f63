"""Recipes, shell completion, and the width of the doctor's report."""

import shutil
import subprocess

import pytest

from effasr import config
from effasr.cli.installation import completion
from effasr.cli.installation.report import Report, Row
from effasr.cli.main import build_parser
from effasr.model.presets import PRESETS
from effasr.training.config import TrainConfig


def test_recipes_are_listed_with_what_they_train(effasr):
    assert effasr("recipes").out == effasr("recipes", "list").out
    for recipe in config.recipes():
        assert f"  {recipe} " in effasr("recipes").out
    assert max(map(len, effasr("recipes").out.splitlines())) <= 80


def test_a_recipe_is_shown_as_it_is(effasr):
    assert effasr("recipes", "show", "demo").out == (config.RECIPES / "demo.yaml").read_text()


@pytest.mark.parametrize("recipe", config.recipes())
def test_a_copy_is_the_recipe_under_another_name(effasr, tmp_path, recipe):
    file = tmp_path / "new" / "mine.yaml"
    assert f"effasr train {file}" in effasr("recipes", "copy", recipe, file).out
    original, copied = (config.load(TrainConfig, item) for item in (recipe, file))
    assert (original.name, copied.name) == (recipe, "mine")
    assert config.to_mapping(copied) == {**config.to_mapping(original), "name": "mine"}


@pytest.mark.parametrize("name", PRESETS)
def test_recipes_of_published_models_have_their_architecture(name):
    assert config.load(TrainConfig, name).model == PRESETS[name]


@pytest.mark.parametrize("name", ["2026-11-05", "960", "1e5", "no", "null", "a: b", "it's # 1"])
def test_a_copy_has_any_name_that_a_file_has(effasr, tmp_path, name):
    file = tmp_path / f"{name}.yaml"
    assert effasr("recipes", "copy", "small", file).code == 0
    assert config.load(TrainConfig, file).name == name


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("tr",), {"train", "transcribe"}),
        (("--v",), {"--version"}),
        (("train", "demo_t"), {"demo_transducer"}),
        (("train", "--s"), {"--show"}),
        (("transcribe", "--format", "s"), {"srt"}),
        (("plan", "--strategy", "bu"), {"bucketed"}),
        (("recipes", "c"), {"copy"}),
        (("recipes", "copy", "sma"), {"small"}),
        (("evaluate", "--be"), {"--beam"}),
        (("prepare", "some"), set()),
    ],
)
def test_bash_completes(words, found):
    listed = " ".join(f"'{word}'" for word in ("effasr", *words))
    program = f"""{completion.script(build_parser())}
        COMP_WORDS=({listed}); COMP_CWORD={len(words)}
        _effasr
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-uc", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == found


def test_the_command_prints_the_script(effasr):
    assert effasr("completion").out == completion.script(build_parser())


def test_what_all_operations_of_a_device_share_is_said_once():
    rows = tuple(
        Row("operations", f"{name} on {device}", "reference", f"triton: no GPU; cpp: {reason}")
        for device in ("cpu", "cuda")
        for name, reason in (("a", "slow"), ("b", "slow" if device == "cuda" else "fast"))
    )
    text = Report(rows).text(100)
    assert text.count("triton: no GPU") == 2
    assert "\nAll on cpu: triton: no GPU.\n" in text
    assert text.endswith("\nAll on cuda: triton: no GPU; cpp: slow.\n")
    assert text.count("cpp: slow") == 2
    assert text.count("cpp: fast") == 1


def test_packages_that_are_absent_are_listed_once():
    absent = "flash: not installed (pip install flash)"
    rows = tuple(
        Row("operations", f"{name} on cpu", "reference", note)
        for name, note in (("a", absent), ("b", f"{absent}; cpp: slow"), ("c", ""))
    )
    text = Report(rows).text(100)
    assert text.count("pip install flash") == 1
    assert text.endswith("\nNot installed: flash (pip install flash).\n")
