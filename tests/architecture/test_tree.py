"""The layout of the tree: file sizes, and the layers and suites that CONTRIBUTING shows."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
(CONTRACT,) = (contract for contract in SETTINGS["contracts"] if contract["type"] == "layers")
LAYERS = [line.split(" | ") for line in CONTRACT["layers"]]
MAX_LINES, MAX_TOP_LEVEL_FILES = 800, 8


def files(folder: Path) -> list[str]:
    """The files of a folder, without the one that makes it a package."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return sorted(name for name in names if name != "__init__.py" and name[0] != ".")


@pytest.mark.parametrize("root", ["effasr", "kernels", "profiling"])
def test_a_file_is_small_enough_to_read(root):
    paths = list((ROOT / root).rglob("*.py"))
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_the_top_of_effasr_is_small():
    assert len(files(ROOT / "effasr")) <= MAX_TOP_LEVEL_FILES


def test_every_package_of_effasr_has_a_layer():
    result = {
        f"effasr.{path.stem}"
        for path in (ROOT / "effasr").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    layers = {name for layer in LAYERS for name in layer}
    assert result - {"effasr.__init__"} == layers - {"effasr_kernels"}


def test_contributing_shows_the_layers_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    visible = [
        line.strip().split("  ")[0] for line in text.splitlines() if line.startswith("    e")
    ]
    assert [line.split(" | ") for line in visible] == LAYERS


def test_contributing_names_the_promise_of_every_suite():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| Promise | ")[2].partition("\n\n")[0]
    paths = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    suites = {
        f"tests/{path.parts[1]}" if len(path.parts) > 2 else "tests/test_*.py" for path in paths
    }
    assert len(suites) > 15
    assert [name for name in sorted(suites) if f"`{name}`" not in table] == []
