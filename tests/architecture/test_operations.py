"""Rules about the folders of operations, and which packages an installation has."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

from effasr_kernels import OPERATIONS

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "effasr_kernels"


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operation_does_not_import_another(name):
    files = list((KERNELS / name).rglob("*.py"))
    assert files
    others = set(OPERATIONS) - {name}
    for path in files:
        for module in _imports(path):
            parts = module.split(".")
            assert parts[0] != "effasr", f"{path} imports {module}"
            assert parts[:1] != ["effasr_kernels"] or parts[1] not in others, f"{path}: {module}"


def test_every_folder_with_a_reference_is_an_operation():
    assert {path.parent.name for path in KERNELS.glob("*/reference.py")} == set(OPERATIONS)


def test_an_installation_has_everything_but_the_support_of_tests():
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = configuration["tool"]["setuptools"]["packages"]["find"]
    rules = {"include": found["include"], "exclude": found["exclude"]}
    packages = [name for place in found["where"] for name in find_packages(ROOT / place, **rules)]
    folders = {
        ".".join(path.parent.relative_to(place).parts)
        for place in (ROOT, ROOT / "kernels")
        for package in ("effasr", "effasr_kernels")
        for path in (place / package).rglob("__init__.py")
    }
    assert set(packages) == folders - {"effasr_kernels.testing"}


def test_operations_need_torch_and_triton_alone():
    allowed = {*sys.stdlib_module_names, "effasr_kernels", "torch", "triton"}
    for path in KERNELS.rglob("*.py"):
        if KERNELS / "testing" not in path.parents:
            found = {module.split(".")[0] for module in _imports(path)}
            assert found <= allowed, f"{path} imports {sorted(found - allowed)}"


def test_nothing_that_is_installed_imports_the_support_of_tests():
    for folder in (ROOT / "effasr", KERNELS):
        for path in folder.rglob("*.py"):
            if KERNELS / "testing" not in path.parents:
                found = [x for x in _imports(path) if x.startswith("effasr_kernels.testing")]
                assert not found, f"{path} imports {found}"
