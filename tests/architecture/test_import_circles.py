"""No module imports itself by way of others, not even for type annotations."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules_of(folder: Path, package: str) -> dict[str, Path]:
    """Files of a package by the names of their modules."""
    found = {}
    for path in (folder / package).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: set[str]) -> set[str]:
    """Modules among the known ones that a file imports: anywhere in it, TYPE_CHECKING included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
    return found & known


def check(folder: Path, package: str) -> None:
    modules = modules_of(folder, package)
    graph = {name: imports_of(path, set(modules)) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("package", ["effasr", "kernels/effasr_kernels"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    check((ROOT / package).parent, Path(package).name)


@pytest.mark.parametrize(
    "imported",
    [
        "from pkg.a import f",
        "import pkg.a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg import a",
        "def f():\n    from pkg.a import g",
    ],
)
def test_a_circle_is_found_wherever_the_import_is(tmp_path: Path, imported: str) -> None:
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("from pkg import b")
    (folder / "b.py").write_text("import os")
    check(tmp_path, "pkg")
    (folder / "b.py").write_text(imported)
    with pytest.raises(pytest.fail.Exception, match=r"pkg\.a <- pkg\.b|pkg\.b <- pkg\.a"):
        check(tmp_path, "pkg")
