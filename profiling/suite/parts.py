"""What the suite does: a part is some commands, on a GPU in full, in a dry run at tiny size."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.gate import CANARY, OPERATIONS, Gate
from suite.steps import LeftOut, Step

ROOT = Path(__file__).parents[2]
PROFILING = ROOT / "profiling"
TESTS = ROOT / "tests"
KERNELS = TESTS / "gpu"
DATA_PACKAGES = ("lhotse", "sentencepiece", "soundfile", "soxr")
# One dtype on two awkward lists of lengths, of every kernel: the tool slows them a hundredfold.
_OF_DECODING = "to_the_bit or new_keys or (append and matches)"
SANITIZED = f"bfloat16 and (odd or empty_among_others or {_OF_DECODING})"
PEER = ("transformers>=5.23",)
"""The first with Canary."""
_SANITIZER_FAILED = 99
_PROCESSES = 12
_TINY = ["--model", "small", "--frame-budget", "100", "--utterances", "60", "--longest", "4"]


@dataclass(frozen=True)
class Setting:
    """How the suite runs.

    Attributes:
        output: Folder of the rows.
        dry: On the CPU, at tiny size.
        unproven: Whether to measure also what no test has proven, into a folder of its own.
    """

    output: Path
    dry: bool = False
    unproven: bool = False

    @property
    def outcomes(self) -> tuple[Path, Path]:
        """Of the tests: those of kernels and, in a dry run, those of references."""
        return self.output / "tests.jsonl", self.output / "tests_reference.jsonl"

    def script(self, name: str, *arguments: str | Path) -> list[str]:
        """A command."""
        return [sys.executable, str(PROFILING / name), *map(str, arguments)]


Steps = Sequence[Step | LeftOut]


@dataclass(frozen=True)
class Part:
    """Commands with one purpose.

    Attributes:
        name: For ``--only`` and ``--skip``.
        weight: Of the time that is left, against the parts that follow.
        about: A line of help.
        steps: What to run, by the setting and what the tests have shown.
    """

    name: str
    weight: float
    about: str
    steps: Callable[[Setting, Gate], Steps]


def environment(setting: Setting, gate: Gate) -> Steps:
    """GPU, versions, sources."""
    on_cpu = ["--cpu"] if setting.dry else []
    file = setting.output / "environment.json"
    return [Step("environment", setting.script("suite/environment.py", "--output", file, *on_cpu))]


def pytest(*arguments: str | Path) -> list[str]:
    """A command; options of plugins that a bare machine lacks are no reason to stop."""
    quiet = ["-q", "-W", "ignore::pytest.PytestConfigWarning", "-p", "no:cacheprovider"]
    # torch 2.9 and 2.10 say so, once, where tests turn TF32 off in the way that older ones know.
    quiet += ["-W", "ignore:Please use the new API settings:UserWarning"]
    return [sys.executable, "-m", "pytest", *quiet, *map(str, arguments)]


def gpu_tests() -> tuple[list[Path], list[LeftOut]]:
    """What has GPU tests; those of the data, only where its packages are installed."""
    absent = [name for name in DATA_PACKAGES if importlib.util.find_spec(name) is None]
    # Marked when collected, where no word in the files says so.
    found, left_out = [], []
    for path in sorted(TESTS.rglob("test_*.py")):
        if KERNELS in path.parents or "mark.gpu" not in path.read_text(encoding="utf-8"):
            continue
        if absent and TESTS / "data" in path.parents:
            left_out.append(LeftOut(path.name, f"needs {', '.join(absent)}"))
        else:
            found.append(path)
    # The others first: among them is a build that takes as long as many kernels.
    return [*found, KERNELS], left_out


def parallel() -> list[str]:
    """Options for several processes: most of the time goes into compiling kernels, on the host."""
    if importlib.util.find_spec("xdist") is None:
        return []
    count = max(1, min(_PROCESSES, (os.cpu_count() or 1) * 3 // 4))
    # Neighbours share kernels, so that a process compiles them once, and none waits at the end.
    return ["-n", str(count), "--dist", "worksteal"]


def tests(setting: Setting, gate: Gate) -> Steps:
    """All GPU tests; in a dry run a few of references, and a kernel in the interpreter."""
    kernels, references = setting.outcomes
    record = ["-p", "suite.outcomes", "--outcomes"]
    if not setting.dry:
        paths, left_out = gpu_tests()
        options = [*record, kernels, "-m", "gpu", "--durations=10", *parallel()]
        more = ["--continue-on-collection-errors", *paths]
        return [*left_out, Step("tests", pytest(*options, *more))]
    kernel = [KERNELS / "test_linear_cross_entropy.py", "-k", "reference and float32-odd"]
    model = "check_order and odd or a_static_pack_is_the_sum or alone_to_the_bit or writes_each_row"
    return [
        Step(
            "tests of kernels",
            pytest(*record, kernels, *kernel),
            variables={"TRITON_INTERPRET": "1"},
        ),
        Step(
            "tests of references",
            pytest(
                *(*record, references, "-m", "not gpu", "-k", model),
                *(TESTS / "ops", TESTS / "model" / "test_asr.py"),
            ),
        ),
    ]


def find_sanitizer() -> str | None:
    """compute-sanitizer, which comes with the CUDA toolkit."""
    places = [os.environ.get("PATH", "")]
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            places.append(str(Path(os.environ[name]) / "bin"))
    places.append("/usr/local/cuda/bin")
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def sanitizer(setting: Setting, gate: Gate) -> Steps:
    """A few tests of each kernel under memcheck; a dry run only looks whether there are any."""
    chosen = ["-k", SANITIZED, KERNELS]
    if setting.dry:
        return [Step("sanitizer", pytest("--collect-only", *chosen))]
    tool = find_sanitizer()
    if tool is None:
        return [LeftOut("sanitizer", "no compute-sanitizer found: no kernel was checked by it")]
    checked = [tool, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_FAILED)]
    # Libraries ask the driver for what it may not have; that is no error of a kernel.
    checked += ["--report-api-errors", "no"]
    # What torch caches would hide reads past the end of a tensor.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [Step("sanitizer", [*checked, *pytest("-m", "gpu", *chosen)], variables=variables)]


def operations(setting: Setting, gate: Gate) -> Steps:
    """Every operation against its peers."""
    reasons = gate.reasons(OPERATIONS)
    proven = [name for name in OPERATIONS if name not in reasons]
    tiny = ["--frames", "40"] if setting.dry else []
    steps: list[Step | LeftOut] = []
    if proven:
        command = setting.script("bench_ops.py", "--output", setting.output / "ops.csv", *tiny)
        steps.append(Step("ops", [*command, "--op", *proven], weight=4, is_budgeted=True))
        if setting.dry and "linear_cross_entropy" in proven:
            one = ["--op", "linear_cross_entropy", "--no-peers"]
            interpreted = {"TRITON_INTERPRET": "1"}
            steps.append(
                Step("ops interpreted", [*command, *one], variables=interpreted, is_budgeted=True)
            )
    if reasons and setting.unproven:
        output = setting.output / "unproven" / "ops.csv"
        command = setting.script("bench_ops.py", "--output", output, *tiny, "--op", *reasons)
        return [*steps, Step("ops unproven", command, weight=2, is_budgeted=True)]
    left_out = [LeftOut(f"ops {x}", f"not measured: {reasons[x]}", well=False) for x in reasons]
    return [*steps, *left_out]


def _behind(name: str, proven: Sequence[str], make: Callable[[Setting], Steps]) -> Callable:
    """The steps of a part, where the tests of all these are green."""

    def steps(setting: Setting, gate: Gate) -> Steps:
        reasons = gate.reasons(proven)
        if not reasons:
            return make(setting)
        if setting.unproven:
            return make(Setting(setting.output / "unproven", setting.dry))
        first, *others = reasons
        more = f"; likewise {', '.join(others)}" if others else ""
        return [LeftOut(name, f"not measured: {first}: {reasons[first]}{more}", well=False)]

    return steps


def _transducer(setting: Setting) -> Steps:
    large = ["--op", "transducer_loss", "--kind", "large 8x", "large 4x"]
    command = setting.script("bench_ops.py", *large, "--output", setting.output / "ops.csv")
    memory = setting.script(
        "transducer_memory.py", "--output", setting.output / "transducer_memory.csv"
    )
    if setting.dry:
        memory += [
            "--batch",
            "2",
            "--joint",
            "8",
            "--classes",
            "16",
            "--frames-per-second",
            "1",
            "--repeats",
            "1",
        ]
        steps = [Step("transducer", [*command, "--no-peers"], is_budgeted=True)]
        return [*steps, Step("transducer memory", memory)]
    return [
        Step("transducer", [*command, "--no-peers"], weight=2, is_budgeted=True),
        Step("transducer memory", [*memory, *["--batch", "8", "16", "32", "64"]], weight=1.5),
        Step("transducer peers", command, weight=3, is_budgeted=True),
    ]


def _training(setting: Setting) -> Steps:
    command = setting.script("bench_training.py", "--output", setting.output / "training.csv")
    if setting.dry:
        systems = ["--systems", "packed_static", "random", "packed"]
        return [
            Step("training", [*command, *_TINY, "--steps", "2", *systems]),
            LeftOut("training graph", "needs a GPU"),
            LeftOut("training peer", "left out of a dry run: its tests run it"),
        ]
    return [
        Step("training", [*command, "--systems", "packed_static", "random", "packed"], weight=3),
        Step("training graph", [*command, "--systems", "packed_static", "--graph"], weight=1.5),
        Step(
            "training peer",
            [*command, "--systems", "transformers", "--steps", "6"],
            weight=3,
            needs=PEER,
        ),
    ]


def _inference(setting: Setting) -> Steps:
    command = setting.script("bench_inference.py", "--output", setting.output / "inference.csv")
    if setting.dry:
        tiny = [
            "--size",
            "tiny",
            "--shapes",
            "2/1",
            "1/2",
            "--batch",
            "2",
            "--longest",
            "3",
            "--repeats",
            "1",
        ]
        return [
            Step("inference", [*command, *tiny, "--repeats", "1"]),
            LeftOut("inference peer", "left out of a dry run: its tests run it"),
        ]
    return [
        Step("inference", [*command, "--shapes", "24/24", "32/4"], weight=3),
        Step("inference more", [*command, "--shapes", "17/4", "18/8"], weight=2),
        Step("inference peer", [*command, "--peer", "--shapes", "17/4"], weight=2, needs=PEER),
    ]


def _memory(setting: Setting) -> Steps:
    command = setting.script("memory_trace.py", "--output", setting.output / "memory.csv")
    return [Step("memory", [*command, *_TINY, "--steps", "6"] if setting.dry else command)]


def _profile(setting: Setting) -> Steps:
    folder = setting.output / "profile"
    record = ["--profile", folder, "--systems", "packed_static"]
    tiny = [*_TINY, "--steps", "2"] if setting.dry else ["--steps", "3"]
    trace = folder / "packed_static" / "rank0.json.gz"
    report = ["report.py", trace, "--output", setting.output / "report"]
    return [
        Step("profile", setting.script("bench_training.py", *record, *tiny), weight=3),
        Step("report", setting.script(*report)),
    ]


PARTS = (
    Part("environment", 30, "GPU, driver, versions, sources", environment),
    Part("tests", 330, "all GPU tests, by which the rest is let through", tests),
    Part("sanitizer", 60, "compute-sanitizer on a few tests of each kernel", sanitizer),
    Part("ops", 130, "every operation against its peers", operations),
    Part(
        "transducer",
        70,
        "B 1024, T 500 and 1000, U 200, V 1024 and 4096; memory by the batch",
        _behind("transducer", ("transducer_loss",), _transducer),
    ),
    Part(
        "training",
        80,
        "canary_180m_flash at real lengths, by system",
        _behind("training", CANARY, _training),
    ),
    Part("inference", 50, "RTFx by decoder depth", _behind("inference", CANARY, _inference)),
    Part("memory", 30, "memory over many steps", _behind("memory", CANARY, _memory)),
    Part(
        "profile", 25, "some steps recorded, and the report", _behind("profile", CANARY, _profile)
    ),
)
"""In this order: what later ones rest on, then what is most wanted. What one leaves of its time is
the others', so weights of the first ones can be generous."""
