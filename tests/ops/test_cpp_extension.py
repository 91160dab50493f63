"""The library of CPU kernels: how setup.py builds it or fails, and what is said without it."""

import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import effasr_kernels
from effasr_kernels import BackendUnavailable, PackedLayout, RelativeBias, attention, ctc_loss
from effasr_kernels.runtime import cuda, native
from effasr_kernels.runtime.cuda import CudaLaunch
from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared import lattice
from effasr_kernels.shared.lattice_losses import groups
from tests.ops.conftest import look_for_the_library_again
from tests.support.cpp_build import ROOT, build, run

LIST = (
    "from distutils.core import run_setup; d = run_setup('setup.py', stop_after='init'); "
    "print([s for e in d.ext_modules or [] for s in e.sources])"
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is loaded is looked up again, before and after."""
    look_for_the_library_again()
    yield
    look_for_the_library_again()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with what setup.py needs, and one source that is compiled at once."""
    folder = tmp_path / "sources"
    (folder / "csrc").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", folder)
    for path in ROOT.glob("csrc/interface*"):
        shutil.copy(path, folder / "csrc")
    return folder


def _build(folder: Path, **variables: str) -> tuple[int, str]:
    places = "--build-lib", "lib", "--build-temp", "temporary"
    done = run("setup.py", "build_ext", *places, cwd=folder, **variables)
    return done.returncode, done.stderr


def test_setup_builds_the_library_unless_told_otherwise() -> None:
    plain = run("-W", "ignore", "-c", "import setuptools; " + LIST)
    assert "csrc/attention_cpu.cpp" in plain.stdout, plain.stderr
    without = run("-W", "ignore", "-c", "import setuptools; " + LIST, EFFASR_BUILD_CPP="0")
    assert without.stdout.split() == ["[]"], without.stderr


@pytest.mark.parametrize(("name", "value"), [("CPP", "0"), ("CUDA", "auto")])
def test_setup_names_the_values_of_its_switches(name: str, value: str) -> None:
    done = run("-W", "ignore", "setup.py", "--version", **{f"EFFASR_BUILD_{name}": "yes"})
    assert done.returncode == 1
    assert f"EFFASR_BUILD_{name} must be {value} " in done.stderr
    assert done.stderr.strip().endswith("but is 'yes'.")


def test_kernels_of_nvcc_are_built_where_it_is(sources: Path) -> None:
    """By request alone a failure ends the installation; without nvcc nothing is said."""
    (sources / "csrc" / "empty.cu").touch()
    variables = {"EFFASR_BUILD_CPP": "0", "CUDACXX": "no-such-nvcc"}
    assert _build(sources, EFFASR_BUILD_CUDA="auto", **variables) == (0, "")
    code, text = _build(sources, EFFASR_BUILD_CUDA="1", **variables)
    assert code == 1
    assert "effasr: the GPU kernels in CUDA C++ could not be built: the C++ compiler 'no" in text
    variables["CUDACXX"] = "false"
    code, text = _build(sources, EFFASR_BUILD_CUDA="auto", **variables)
    assert code == 0
    assert "installed without its GPU kernels in CUDA C++: false failed" in text
    assert "false failed" in (sources / "lib" / "effasr_kernels" / cuda.FAILURE).read_text()
    _, text = _build(sources, EFFASR_BUILD_CUDA="auto", TORCH_CUDA_ARCH_LIST="8", **variables)
    assert "TORCH_CUDA_ARCH_LIST has '8', which is not like 9.0+PTX" in text


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_nvcc_builds_a_library_that_is_checked(
    monkeypatch: pytest.MonkeyPatch, sources: Path
) -> None:
    text = 'extern "C" int effasr_cuda_interface() { return 77; }\n'
    (sources / "csrc" / "other.cu").write_text(text)
    variables = {"EFFASR_BUILD_CPP": "0", "TORCH_CUDA_ARCH_LIST": "8.0"}
    assert _build(sources, EFFASR_BUILD_CUDA="1", **variables) == (0, "")
    monkeypatch.setattr(effasr_kernels, "__path__", [str(sources / "lib" / "effasr_kernels")])
    found = cuda.load.__wrapped__()
    assert isinstance(found, str)
    assert re.search(r"_cuda\.so has interface 77, but \d+ is needed: build it again", found)


def test_launches_of_cuda_can_be_recorded_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the current stream, from memory that PyTorch allocated, and wait for nothing."""
    q = torch.ones(9, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    position = RelativeBias(q[0], q[0], q.new_ones(9, 2, 64))
    with recording() as launches:
        layout = PackedLayout.from_lengths([4, 5])
        attention(q, q, q, layout, position=position, backend="cuda").sum().backward()
    calls: list[tuple[Any, ...]] = []
    names = [x.kernel for x in launches if isinstance(x, CudaLaunch)]
    take = lambda name: lambda *values: calls.append((name, *values[1:-1], values[-1].value))
    library = SimpleNamespace(**{f"effasr_{name}": take(name) for name in names})
    monkeypatch.setattr(cuda, "load", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=77))
    for made in launches:
        if isinstance(made, CudaLaunch):
            cuda.launch(made)
    # Two tiles with rows, one number for each sequence and the tail.
    assert calls == [("attention_forward", 1, 64, 3, 67584, 77)]


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_launchers_of_cuda_neither_wait_nor_allocate(tmp_path: Path) -> None:
    built = tmp_path / "launcher.o"
    command = (
        "nvcc",
        "-std=c++17",
        "-c",
        "-arch=sm_80",
        ROOT / "csrc" / "attention_forward.cu",
        "-o",
        built,
    )
    subprocess.run(command, check=True)
    shown = subprocess.run(["nm", "-u", built], check=True, capture_output=True, text=True).stdout
    # Newer versions of nvcc launch by a function of their own.
    used = set(re.findall(r" (cuda\w+|\w*malloc|_Znw\w+)", shown)) - {"cudaLaunchKernel"}
    assert used == {"cudaFuncSetAttribute", "cudaGetLastError"}


def test_without_a_compiler_the_installation_goes_on_and_says_so(sources: Path) -> None:
    code, text = _build(sources, CXX="no-such-compiler")
    assert code == 0
    line = "installed without its CPU kernels, so slower on CPUs: the C++ compiler 'no-such-compil"
    assert line in text
    package = sources / "lib" / "effasr_kernels"
    assert not (package / native.LIBRARY).exists()
    assert "'no-such-compiler' cannot be run" in (package / native.FAILURE).read_text()


def test_a_failure_to_compile_is_told_by_its_first_error(sources: Path) -> None:
    (sources / "csrc" / "broken.cpp").write_text("int broken(void) { return nothing; }\n")
    code, text = _build(sources)
    assert code == 0
    assert "csrc/broken.cpp:1:" in text
    assert "nothing" in (sources / "lib" / "effasr_kernels" / native.FAILURE).read_text()
    code, text = _build(sources, EFFASR_BUILD_CPP="1")
    assert code == 1
    assert "effasr: the CPU kernels could not be built: " in text


def test_a_later_build_replaces_the_reason(sources: Path) -> None:
    _build(sources, CXX="no-such-compiler")
    code, text = _build(sources)
    assert code == 0, text
    package = sources / "lib" / "effasr_kernels"
    assert [x.name for x in package.iterdir()] == [native.LIBRARY]


def test_a_wheel_is_of_a_processor_and_any_python(sources: Path) -> None:
    done = run("setup.py", "-q", "bdist_wheel", "--plat-name", "linux_test", cwd=sources)
    assert done.returncode == 0, done.stderr
    (wheel,) = (sources / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-linux_test.whl")
    assert f"effasr_kernels/{native.LIBRARY}" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_build_is_refused(
    monkeypatch: pytest.MonkeyPatch, sources: Path
) -> None:
    for name, contents, reason in (
        (
            "interface.h",
            '#define EFFASR_INTERFACE 77\nextern "C" int effasr_interface(void);\n',
            r"has interface 77, but \d+ is needed: build it again",
        ),
        ("interface_cpu.cpp", "", "cannot be loaded: .*effasr_interface"),
    ):
        (sources / "csrc" / name).write_text(contents)
        folder = sources / f"of_{name}"
        places = "--build-lib", str(folder), "--build-temp", "temporary"
        assert run("setup.py", "build_ext", *places, cwd=sources).returncode == 0
        monkeypatch.setattr(effasr_kernels, "__path__", [str(folder / "effasr_kernels")])
        look_for_the_library_again()
        found = native.unsupported_reason()
        assert found is not None
        assert re.search(reason, found), found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-fsyntax-only"], id="parsed"),
        # Some warnings come of what the optimizer finds out.
        pytest.param(["-O3", "-c", "-o", "/dev/null"], id="optimized", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("source", sorted(ROOT.glob("csrc/*.cpp")), ids=lambda path: path.stem)
def test_the_compiler_warns_of_nothing(source: Path, options: list[str]) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("no g++ on this machine to compile csrc/ with")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread"]
    command = [compiler, *flags, *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.usefixtures("fresh")
def test_a_build_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path) / "effasr_kernels"
    monkeypatch.setattr(effasr_kernels, "__path__", [str(folder)])
    assert native.unsupported_reason() is None


@pytest.mark.usefixtures("fresh")
def test_without_a_library_the_reference_serves_and_says_how_to_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the reason that the installation left, if it left one."""
    monkeypatch.setattr(effasr_kernels, "__path__", [str(tmp_path)])
    layout = PackedLayout.from_lengths([2])
    given = torch.randn(2, 3), torch.randn(4, 3), torch.tensor([1, 2]), layout, layout
    q = torch.randn(2, 1, 8)
    assert ctc_loss(*given, blank_id=0).shape == (1,)
    assert attention(q, q, q, layout).shape == q.shape
    with pytest.raises(BackendUnavailable, match=r"cpp: .*_cpu\.so was not built \(with a C"):
        attention(q, q, q, layout, backend="cpp")
    x, lengths = torch.zeros(1), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(BackendUnavailable, match=r"CPU kernels cannot run .*_cpu\.so was not"):
        lattice.ctc(x[None], None, x.long()[:0], lengths, lengths * 0)
    (tmp_path / native.FAILURE).write_text("no 'c++' here\n")
    look_for_the_library_again()
    reason = r"cpp: .*_cpu\.so could not be built: no 'c\+\+' here \(with a C\+\+ compiler, pip"
    with pytest.raises(BackendUnavailable, match=reason):
        ctc_loss(*given, blank_id=0, backend="cpp")
    with pytest.raises(BackendUnavailable, match=reason):
        attention(q, q, q, layout, backend="cpp")


def test_groups_are_as_long_as_they_may_be() -> None:
    divide = lambda sizes, most: list(groups(sizes, most))
    assert divide([], 5) == []
    assert divide([2, 3, 1, 5, 9, 0, 1], 5) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 7)]
    assert divide([0, 0], 0) == [(0, 2)]
    assert divide([4, 4], 0) == [(0, 1), (1, 2)]
