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


def imports_of(path: Path, known: set[str], *, executed: bool = False) -> set[str]:
    """Modules among the known ones that a file imports.

    They are all of them, in functions and for type annotations too, or those that are imported when
    the file is ``executed``.
    """
    found, waiting = set(), [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path} has a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in known else node.module)
        is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not (executed and is_lazy):
            waiting += ast.iter_child_nodes(node)
    return found & known


def check(folder: Path, package: str) -> None:
    modules = modules_of(folder, package)
    graph = {name: imports_of(path, set(modules)) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " <- ".join(error.args[1]))


def test_training_imports_few_modules_in_short_chains():
    """Those of every run; searches, gossip and calibration are imported as they are needed."""
    paths = modules_of(ROOT, "effasr") | modules_of(ROOT / "kernels", "effasr_kernels")
    known = set(paths)
    graph = {name: imports_of(path, known, executed=True) - {name} for name, path in paths.items()}
    command = "effasr.cli.train"
    # It imports the trainer when it runs.
    graph[command] = imports_of(paths[command], known)
    reached, waiting = {command}, [command]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    assert "effasr.training.step" in reached
    assert len(reached) <= 250
    lengths: dict[str, int] = {}
    for name in TopologicalSorter({name: graph[name] for name in reached}).static_order():
        lengths[name] = 1 + max((lengths[other] for other in graph[name]), default=0)
    assert max(lengths.values()) <= 20


@pytest.mark.parametrize("package", ["effasr", "kernels/effasr_kernels"])
def test_no_module_imports_itself_by_way_of_others(package):
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
def test_a_circle_is_found_wherever_the_import_is(tmp_path, imported):
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "a.py").write_text("from pkg import b")
    (folder / "b.py").write_text("import os")
    check(tmp_path, "pkg")
    (folder / "b.py").write_text(imported)
    with pytest.raises(pytest.fail.Exception, match=r"pkg\.a <- pkg\.b|pkg\.b <- pkg\.a"):
        check(tmp_path, "pkg")
