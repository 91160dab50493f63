"""Parts of the suite, and the first ones: the environment and the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from suite.gate import GROUPS, OPERATIONS, Gate, groups_of, outcomes_in
from suite.steps import LeftOut, Step

ROOT = Path(__file__).parents[2]
PROFILING = ROOT / "profiling"
TESTS = ROOT / "tests"
KERNELS = TESTS / "gpu"
DATA_PACKAGES = ("lhotse", "sentencepiece", "soundfile", "soxr")
_FIRST = (
    *("attention", "linear_cross_entropy", "depthwise_conv", "subsampling_stem"),
    *("strided_depthwise", "dropout_add_layer_norm", "bias_activation_dropout", "model"),
    *("projected_top_k", "decode_attention", "append_to_pages"),
    *("decoding engine", "transducer_loss", "ctc_loss", "guided_attention"),
    *("batch_norm", "update_running_statistics", "grouped_linear"),
    *("audio_windows", "normalize_features", "mask_features"),
    *("rms_norm", "gated_activation", "conversations"),
)
"""The groups in the order in which their tests run: what most rows use comes first."""
TESTED = "all that this call rests on has been tested by an earlier one"
_PROCESSES = 12
_HANGING_S = 150
"""Seconds after which a test hangs; a process that compiles beside eleven others is slow."""
REFERENCES = "check_order and odd or a_static_pack_is_the_sum or alone_to_the_bit or "
REFERENCES += "writes_each_row or leave_and_others_enter or batch_has_the_same_shape or "
REFERENCES += "moves_as_the_module or neighbour_reaches or reaches_no_other_row or "
REFERENCES += "refilled_row_forgets"
"""A few tests of references, models and the engine, which take a CPU little time."""


@dataclass(frozen=True)
class Setting:
    """Settings of the suite.

    Attributes:
        output: Folder of the rows.
        dry: Whether to run on the CPU at tiny size.
        unproven: Whether to measure also what no test has verified, into a separate folder.
        wanted: Groups of tests that the selected parts depend on.
        trains: Whether steps of the large models are measured.
    """

    output: Path
    dry: bool = False
    unproven: bool = False
    wanted: Collection[str] = GROUPS
    trains: bool = False

    @property
    def outcomes(self) -> Path:
        """The outcomes of the tests of kernels, or in a dry run of those of references."""
        return self.output / "tests.jsonl"

    @property
    def poisoned(self) -> Path:
        """Which files of tests have cost a process its GPU, see `suite.poison`."""
        return self.output / "tests_poisoned"

    def script(self, name: str, *arguments: str | Path) -> list[str]:
        """Return a command."""
        return [sys.executable, str(PROFILING / name), *map(str, arguments)]


Steps = Sequence[Step | LeftOut]


@dataclass(frozen=True)
class Part:
    """Commands with one purpose.

    Attributes:
        name: Name for ``--only`` and ``--skip``.
        about: A line of help.
        steps: Returns the steps to run from the setting and the test results.
        calls: Calls in which it runs; for each the least seconds that earlier parts leave it, and
            its weight in the spare time.
        uses: Groups of tests on which its rows rest.
        needs: Required packages, without which the part is left out.
    """

    name: str
    about: str
    steps: Callable[[Setting, Gate], Steps]
    calls: Mapping[int, tuple[float, float]]
    uses: Sequence[str] = ()
    needs: Sequence[str] = ()


def environment(setting: Setting, gate: Gate) -> Steps:
    """GPU, versions, sources."""
    on_cpu = ["--cpu"] if setting.dry else []
    file = setting.output / "environment.json"
    return [Step("environment", setting.script("suite/environment.py", "--output", file, *on_cpu))]


def pytest(*arguments: str | Path) -> list[str]:
    """Return a command; options of plugins that a bare machine lacks are no reason to stop."""
    quiet = ["-q", "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider"]
    # torch 2.9 and 2.10 say so, once, where tests turn TF32 off in the way that older ones know.
    quiet += ["-W", "ignore:Please use the new API settings:UserWarning"]
    return [sys.executable, "-m", "pytest", *quiet, *map(str, arguments)]


def gpu_tests(wanted: Collection[str] = GROUPS) -> tuple[list[Path], list[LeftOut]]:
    """The files with GPU tests of some groups; those of the data where its packages are there."""
    absent = [name for name in DATA_PACKAGES if importlib.util.find_spec(name) is None]
    found, left_out = [], []
    for path in sorted(TESTS.rglob("test_*.py")):
        # Those of kernels are marked when collected, where no word in the files says so.
        if KERNELS not in path.parents and "mark.gpu" not in path.read_text(encoding="utf-8"):
            continue
        if not set(groups_of(str(path))) & set(wanted):
            continue
        if absent and TESTS / "data" in path.parents:
            left_out.append(LeftOut(path.name, f"needs {', '.join(absent)}"))
        else:
            found.append(path)
    return sorted(found, key=_turn), left_out


def _turn(path: Path) -> tuple[int, int, str]:
    """Sort key: the first group that a file covers; shared operations come early."""
    groups = groups_of(str(path))
    places = [_FIRST.index(name) for name in groups if name in _FIRST]
    return min(places, default=len(_FIRST)), -len(groups), path.name


def parallel() -> list[str]:
    """Return options for several processes: most of the time is compilation on the host."""
    if importlib.util.find_spec("xdist") is None:
        return []
    count = max(1, min(_PROCESSES, (os.cpu_count() or 1) * 3 // 4))
    # In small portions, so that what is first in the order is also run first.
    return ["-n", str(count), "--dist", "load", "--max-worker-restart", "200"]


def _bounded() -> list[str]:
    """Return options that end the process of a test that hangs, for example in CUDA."""
    if importlib.util.find_spec("pytest_timeout") is None:
        return []
    return [f"--timeout={_HANGING_S}", "--timeout-method=thread"]


def _record(setting: Setting) -> list[str | Path]:
    done = setting.output / "tests_done"
    return ["-p", "suite.outcomes", "--outcomes", setting.outcomes, "--done", done]


def _list_done(setting: Setting) -> None:
    """Write down which tests are not to be run again; all others are, also of an earlier call."""
    _, outcomes = outcomes_in(setting.outcomes)
    (setting.output / "tests_done").write_text(json.dumps(sorted(outcomes)), encoding="utf-8")


def tests(setting: Setting, gate: Gate) -> Steps:
    """The GPU tests that this call rests on and no earlier one has run; in a dry run a few."""
    lacking = [name for name in gate.lacking(setting.wanted) if name in setting.wanted]
    if setting.dry:
        return _dry_tests(setting, lacking)
    files, left_out = gpu_tests(lacking)
    if not files:
        return [*left_out, LeftOut("tests", TESTED)]
    options = ["-m", "gpu", "--durations=10", *parallel(), *_bounded()]
    guarded = ["-p", "suite.poison", "--poisoned", setting.poisoned]
    more = ["--continue-on-collection-errors", *files]
    command = pytest(*_record(setting), *guarded, *options, *more)
    before = lambda: _list_done(setting)
    return [*left_out, Step("tests", command, before=before, again=20, nothing=5)]


def _dry_tests(setting: Setting, lacking: Sequence[str]) -> Steps:
    """Return tests of references, and of a compiled kernel in the emulator, without a GPU."""
    files = [TESTS / "ops" / f"test_{name}.py" for name in OPERATIONS if name in lacking]
    files += [TESTS / "model" / "test_asr.py"] * ("model" in lacking)
    files += [TESTS / "decoding" / "test_continuous_batching.py"] * ("decoding engine" in lacking)
    if importlib.util.find_spec("transformers") is not None:
        answers = TESTS / "decoding" / "language_model" / "test_engine.py"
        files += [answers] * ("conversations" in lacking)
    if not any(importlib.util.find_spec(name) is None for name in DATA_PACKAGES):
        files += [TESTS / "data" / "test_loader.py"] * ("data loader" in lacking)
    before = lambda: _list_done(setting)
    found: list[Step | LeftOut] = []
    if "linear_cross_entropy" in lacking:
        one = [KERNELS / "test_linear_cross_entropy.py", "-k", "reference and bfloat16-odd"]
        emulated = {"EFFASR_EMULATE": "90"}
        command = pytest(*_record(setting), "-p", "suite.poison", *one)
        found.append(Step("tests of kernels", command, variables=emulated, before=before))
    if files:
        chosen = ["-m", "not gpu", "-k", REFERENCES]
        command = pytest(*_record(setting), *chosen, *files)
        found.append(Step("tests of references", command, before=before, weight=2))
    return found or [LeftOut("tests", TESTED)]


def missing(needs: Sequence[str]) -> str:
    """Return the requirements that are missing or too old."""
    lacking = []
    for need in needs:
        name, _, least = need.partition(">=")
        try:
            found = version(name)
        except PackageNotFoundError:
            lacking.append(f"needs {need}, which is not installed")
            continue
        if _numbers(found) < _numbers(least):
            lacking.append(f"needs {need}, but {found} is installed")
    return "; ".join(lacking)


def no_interpreter() -> str:
    """Return why Triton's interpreter cannot run with these versions; empty if it can."""
    try:
        triton, numpy = version("triton"), version("numpy")
    except PackageNotFoundError as error:
        return f"needs {error.name}"
    if _numbers(triton) < [3, 7] and _numbers(numpy) >= [2, 4]:
        return (
            f"the interpreter of triton {triton} does not work with numpy {numpy}, which converts "
            "0-dimensional arrays alone to numbers"
        )
    return ""


def _numbers(found: str) -> list[int]:
    return [int(x) for x in found.split("+")[0].split(".") if x.isdigit()]
