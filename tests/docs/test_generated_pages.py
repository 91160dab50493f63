"""Pages of fields and of the API are those of the docstrings; examples run on a CPU."""

import dataclasses
import re

import pytest
import torch

from effasr import config as configuration
from effasr.training.config import TrainConfig
from effasr_kernels import OPERATIONS
from tests.docs.scripts import ROOT, load


@pytest.fixture(scope="module")
def generate():
    return load(ROOT / "docs/generate_fields.py")


def test_the_page_is_that_of_the_docstrings(generate, tmp_path, monkeypatch):
    assert generate.main(["--check"]) == 0
    monkeypatch.setattr(generate, "PAGE", tmp_path / "fields.md")
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert (tmp_path / "fields.md").read_text() == (ROOT / "docs/fields.md").read_text()


def test_every_field_of_a_recipe_is_explained(generate):
    """Where a recipe that names all fields has them, also in parts that are null by default."""
    result = generate.sections(TrainConfig)
    paths = {path for local in result.values() for path in local}
    for recipe in configuration.recipes():
        _check(configuration.load(TrainConfig, recipe), "", paths)
    for cls in result:
        fields = {field.name for field in dataclasses.fields(cls) if field.init}
        assert fields <= generate.meanings(cls).keys()
        assert all(generate.meanings(cls).values())


def _check(config: object, path: str, paths: set[str]) -> None:
    assert path in paths
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _check(value, f"{path}.{field.name}".lstrip("."), paths)


def test_the_fields_of_the_migration_page_exist(generate):
    """Its last column names fields, sections and their values as recipes have them."""
    fields: dict[str, set[str]] = {}
    for cls, paths in generate.sections(TrainConfig).items():
        for path in paths:
            names = {field.name for field in dataclasses.fields(cls) if field.init}
            fields.setdefault(path, set()).update(names)
    text = (ROOT / "docs/migration.md").read_text()
    rows = [
        line.split(" | ")[-1].replace("`wav.scp`", "")
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    named = re.findall(
        r"`([a-z_]+(?:\.[a-z_]+)+)\b(?!/)", " ".join([*rows, text.split("## NeMo")[0]])
    )
    unknown = {
        name
        for name in named
        if "wav.scp" not in name
        if name.rpartition(".")[2] not in fields.get(name.rpartition(".")[0], ())
    }
    assert len(named) > 50
    assert not unknown, unknown


EXAMPLES = ROOT / "docs/examples"


@pytest.fixture(scope="module")
def api():
    return load(ROOT / "docs/generate_api.py")


def test_the_pages_are_those_of_the_docstrings_without_their_marks(api):
    assert api.main(["--check"]) == 0
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    assert pages.keys() == {"README", *OPERATIONS}
    for text in pages.values():
        marks = re.findall(r"\.\. math|````|(?<!`)``(?!`)|^(?:Args|Returns|Raises):", text, re.M)
        assert marks == []


def test_an_outdated_page_is_found_and_written_anew(api, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "ROOT", tmp_path)
    monkeypatch.setattr(api, "API", tmp_path / "api")
    assert api.main([]) == 0
    page = tmp_path / "api" / "attention.md"
    page.write_text(page.read_text().replace("softmax", "softmin"))
    (tmp_path / "api" / "gone.md").touch()
    assert api.main(["--check"]) == 1
    assert api.main([]) == 0
    assert api.main(["--check"]) == 0
    assert not (tmp_path / "api" / "gone.md").exists()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_example_of_an_operation_runs(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert re.search(rf"from effasr_kernels import .*\b{name}\b", text)
    assert re.search(r"^(assert|torch.testing)", text, re.M)
    torch.manual_seed(0)
    exec(compile(text, str(EXAMPLES / f"{name}.py"), "exec"), {})
