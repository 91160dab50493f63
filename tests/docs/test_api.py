"""The API pages are those of the docstrings, and their examples run on a CPU."""

import re

import pytest
import torch

from effasr_kernels import OPERATIONS
from tests.docs.scripts import ROOT, load

EXAMPLES = ROOT / "docs/examples"


@pytest.fixture(scope="module")
def generate():
    return load(ROOT / "docs/generate_api.py")


def test_the_pages_are_those_of_the_docstrings_without_their_marks(generate):
    assert generate.main(["--check"]) == 0
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    assert pages.keys() == {"README", *OPERATIONS}
    for text in pages.values():
        marks = re.findall(r"\.\. math|````|(?<!`)``(?!`)|^(?:Args|Returns|Raises):", text, re.M)
        assert marks == []


def test_an_outdated_page_is_found_and_written_anew(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "API", tmp_path / "api")
    assert generate.main([]) == 0
    page = tmp_path / "api" / "attention.md"
    page.write_text(page.read_text().replace("softmax", "softmin"))
    (tmp_path / "api" / "gone.md").touch()
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    assert not (tmp_path / "api" / "gone.md").exists()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_example_of_an_operation_runs(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert re.search(rf"from effasr_kernels import .*\b{name}\b", text)
    assert re.search(r"^(assert|torch.testing)", text, re.M)
    torch.manual_seed(0)
    exec(compile(text, str(EXAMPLES / f"{name}.py"), "exec"), {})
