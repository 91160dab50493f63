"""A source distribution has all that an installation, and the extension, are built from."""

import shutil
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.csrc.build import ROOT, run

FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


@pytest.mark.skipif(int(version("setuptools").split(".")[0]) < 77, reason="setuptools is too old")
def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    for name in (*FILES, "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("csrc", "effasr", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    (tmp_path / "kernels" / "effasr_kernels" / "_C.so").touch()
    done = run("-W", "ignore", "setup.py", "-q", "sdist", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as file:
        found = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    wanted = [
        path
        for folder in ("csrc", "effasr", "kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".cpp", ".h", ".md")
    ]
    # Support of tests is left out, as the tests are.
    left_out = ROOT / "kernels" / "effasr_kernels" / "testing"
    assert {str(path.relative_to(ROOT)) for path in wanted if left_out not in path.parents} <= found
    assert not [name for name in found if name.startswith("kernels/effasr_kernels/testing")]
    assert {"setup.py", "LICENSE", "constraints.txt"} <= found
    assert not [name for name in found if name.endswith((".so", ".pyc"))]
