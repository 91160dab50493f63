"""What is published installs into an empty environment, with all that it needs, and runs there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from importlib.metadata import version

import pytest

from tests.support.archives import extract
from tests.support.cpp_build import ROOT, run

FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
RELEASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
pytestmark = pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77, reason="setuptools is too old"
)


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in (*FILES, "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("csrc", "effasr", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "kernels" / "effasr_kernels" / "_C.so").touch()
    done = run("-W", "ignore", "setup.py", "-q", "sdist", cwd=folder)
    assert done.returncode == 0, done.stderr
    (archive,) = (folder / "dist").iterdir()
    return archive


def test_a_source_distribution_is_complete(source_distribution):
    with tarfile.open(source_distribution) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    sources = [
        path
        for folder in ("csrc", "effasr", "kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".cpp", ".cu", ".cuh", ".h", ".md", ".typed")
    ]
    assert {str(path.relative_to(ROOT)) for path in sources} <= names
    assert {"setup.py", "LICENSE", "constraints.txt"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_it_installs_and_runs_in_an_empty_environment(source_distribution, tmp_path):
    """From the source distribution to a wheel to an environment without this checkout."""
    extract(source_distribution, tmp_path)
    (sources,) = tmp_path.iterdir()
    done = run(
        *("-W", "ignore", "setup.py", "-q", "bdist_wheel"), cwd=sources, EFFASR_BUILD_CPP="0"
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (sources / "dist").iterdir()

    empty = tmp_path / "environment"
    venv.create(empty, with_pip=False)
    python = str(empty / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path)

    # Dependencies come from this environment, behind the new one's packages. A .pth file in a
    # folder that is added so is not read, which leaves out an editable installation of effasr.
    (packages,) = (empty / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        return subprocess.run(
            command, check=True, cwd=tmp_path, env=variables, capture_output=True, text=True
        ).stdout

    program = str(empty / "bin" / "effasr")
    assert output(program, "--version") == f"effasr {RELEASE}\n"
    assert "librispeech_100h" in output(program, "recipes")
    code = "import effasr, effasr_kernels as k; print(effasr.__file__, k.__file__, k.attention)"
    printed = output(python, "-c", code)
    assert printed.count(str(empty)) == 2, printed
    assert all((packages / name / "py.typed").is_file() for name in ("effasr", "effasr_kernels"))


def test_the_changelog_has_this_version():
    assert f"\n## {RELEASE} - " in (ROOT / "CHANGELOG.md").read_text()
