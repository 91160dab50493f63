"""Operations: compilation ahead, what is measured of each, and what tools tell of kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from suite.gate import OPERATIONS, TRAINING, Gate
from suite.models import FRAME_BUDGET, MODELS, TINY, compiled
from suite.parts import KERNELS, Setting, Steps, no_interpreter, pytest
from suite.steps import LeftOut, Step

MATTER = (
    ("attention", "relative", "attention_forward"),
    ("attention", "relative", "attention_backward_kv"),
    ("attention", "relative", "attention_backward_q"),
    ("linear_cross_entropy", "smoothing 0.1", "_partial_normalizers"),
    ("depthwise_conv", "", "convolve_backward"),
)
"""Operation, kind and kernel of what takes most of the time of our kernels in training."""
# One dtype on two awkward lists of lengths, of every kernel: the tool slows them a hundredfold.
_OF_DECODING = "to_the_bit or new_keys or (append and matches)"
# Widths that no tile divides, of the subsampling and of language models; and the lattices, in the
# transducer's own tests.
_OF_OTHERS = "((any_number_of_channels or any_width) and 37) or agrees_in_every_dtype"
SANITIZED = f"bfloat16 and (odd or empty_among_others or {_OF_DECODING} or {_OF_OTHERS})"
SANITIZED += " or (every_layout and odd) or (running_statistics and empty_among_others)"
_SANITIZER_FAILED = 99
TRANSDUCER_KINDS = ("", "tdt")
"""All but the large batches, which take minutes, and have a part of their own."""
_ORDER = ("attention", "linear_cross_entropy", "depthwise_conv", "subsampling_stem")
_WEIGHTS = {"attention": 4.0, "linear_cross_entropy": 3.0, "transducer_loss": 2.0}


def warm_up(setting: Setting, gate: Gate) -> Steps:
    """Return steps that compile kernels on all cores; benchmarks would compile one by one."""
    wanted = setting.wanted
    is_measured = lambda names: setting.unproven or not gate.reasons(names)
    ops = [x for x in OPERATIONS if x in wanted and is_measured([x])]
    options: list[str] = ["--op", *ops] if ops and not setting.trains else []
    steps: list[Step | LeftOut] = []
    if setting.trains and is_measured(TRAINING):
        options = [*TINY] if setting.dry else ["--model", *MODELS, *FRAME_BUDGET]
        steps = [] if setting.dry else [compiled(setting, model) for model in MODELS]
    if not options:
        return [LeftOut("warm up", "nothing to be measured has green tests")]
    size = ["--frames", "40", "--processes", "2"] if setting.dry else ["--frames", "8448"]
    if "attention" in ops and not setting.dry:
        size += ["--head-width", "64", "128", "256"]
    script = setting.script("kernels/launch_kernels.py", "--compile")
    if not setting.dry and ops and not setting.trains and "transducer_loss" in ops:
        # The joint of the large batches has a width of its own.
        large = ["--op", "transducer_loss", "--kind", "large 8x", "--processes", "4"]
        steps.append(Step("warm up transducer", [*script, *large], beside=True))
    return [*steps, Step("warm up", [*script, *options, *size])]


def operations(setting: Setting, gate: Gate) -> Steps:
    """Measure every operation against its peers, each in its own process."""
    tiny = ["--frames", "40"] if setting.dry else []
    reasons = gate.reasons(OPERATIONS)
    names = sorted(OPERATIONS, key=lambda x: _ORDER.index(x) if x in _ORDER else len(_ORDER))
    steps: list[Step | LeftOut] = []
    if setting.unproven or "attention" not in reasons:
        tiles = setting.script("kernels/attention_tiles.py", *tiny)
        output = ["--output", str(_folder(setting, "attention", reasons) / "attention_tiles.csv")]
        note = gate.note(["attention"])
        steps.append(
            Step("attention tiles", [*tiles, *output], 3, 20, budget="--budget-s", note=note)
        )
    for name in names:
        if name in reasons and not setting.unproven:
            reason = f"not measured: {reasons[name]}"
            steps.append(LeftOut(f"ops {name}", reason, well=False))
            continue
        options = ["--output", _folder(setting, name, reasons) / "ops.csv", *tiny, "--op", name]
        command = setting.script("bench_ops.py", *options)
        if name == "transducer_loss":
            kinds = [] if setting.dry else ["--kind", *TRANSDUCER_KINDS]
            command = [*command, *kinds]
        floor = 20.0 if name in _WEIGHTS else 6.0
        steps.append(
            Step(
                f"ops {name}",
                command,
                weight=_WEIGHTS.get(name, 1.0),
                floor=0.0 if setting.dry else floor,
                budget="--budget-s",
                note=gate.note([name]),
            )
        )
    if setting.dry and "linear_cross_entropy" not in reasons:
        steps.append(_interpreted(setting, tiny))
    return steps


def _folder(setting: Setting, name: str, reasons: Collection[str]) -> Path:
    """Return the folder of what is measured of an operation."""
    return setting.output / "unproven" if name in reasons else setting.output


def _interpreted(setting: Setting, tiny: Sequence[str]) -> Step | LeftOut:
    reason = no_interpreter()
    if reason:
        return LeftOut("ops interpreted", reason)
    one = ["--op", "linear_cross_entropy", "--no-peers"]
    command = setting.script("bench_ops.py", "--output", setting.output / "ops.csv", *tiny, *one)
    return Step("ops interpreted", command, variables={"TRITON_INTERPRET": "1"})


def transducer(setting: Setting, gate: Gate) -> Steps:
    """Return the batch of the published mark, and memory by the batch."""
    large = ["--op", "transducer_loss", "--kind", "large 8x", "large 4x"]
    command = setting.script("bench_ops.py", *large, "--output", setting.output / "ops.csv")
    ours = [*command, "--no-peers"]
    memory = setting.script(
        "studies/transducer_memory.py", "--output", setting.output / "transducer_memory.csv"
    )
    if setting.dry:
        memory += ["--batch", "2", "--joint", "8", "--classes", "16", "--repeats", "1"]
        memory += ["--frames-per-second", "1"]
        return [
            Step("transducer", ours, budget="--budget-s"),
            Step("transducer memory", memory),
        ]
    return [
        Step("transducer", ours, weight=3, floor=50, budget="--budget-s"),
        Step("transducer peers", command, weight=3, floor=40, budget="--budget-s"),
        Step("transducer memory", [*memory, *["--batch", "8", "16", "32", "64"]], weight=1.5),
    ]


def wide_heads(setting: Setting, gate: Gate) -> Steps:
    """Attention at the widest heads that the kernels serve."""
    size = ["--frames", "40"] if setting.dry else ["--frames", "8448"]
    width = ["--head-width", "32" if setting.dry else "256"]
    output = ["--output", setting.output / "ops.csv"]
    command = setting.script("bench_ops.py", "--op", "attention", *size, *width, *output)
    return [Step("wide heads", command, budget="--budget-s")]


def find_tool(name: str) -> str | None:
    """Return a program of the CUDA toolkit, or of the system."""
    places = [os.environ.get("PATH", "")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            places.append(str(Path(os.environ[variable]) / "bin"))
    places.append("/usr/local/cuda/bin")
    return shutil.which(name, path=os.pathsep.join(places))


def counters(setting: Setting, gate: Gate) -> Steps:
    """Nsight Compute on the kernels that matter, at the clocks that are set."""
    tool = find_tool("ncu")
    if tool is None and not setting.dry:
        return [LeftOut("ncu", "no ncu found: no counters of kernels were read")]
    steps: list[Step | LeftOut] = []
    for op, kind, kernel in MATTER:
        reasons = gate.reasons([op])
        if reasons and not setting.unproven:
            steps.append(LeftOut(f"ncu {kernel}", f"not measured: {op}: {reasons[op]}", well=False))
            continue
        size = ["--frames", "40"] if setting.dry else ["--frames", "8448", "--head-width", "128"]
        backend = ["--backend", "reference"] if setting.dry else []
        once = ["--once", "--op", op, "--kind", kind, *size, *backend]
        command = setting.script("kernels/launch_kernels.py", *once)
        if setting.dry:
            return [Step("ncu, the command alone", command)]
        log = _folder(setting, op, reasons) / "ncu" / f"{kernel}.csv"
        log.parent.mkdir(parents=True, exist_ok=True)
        # Its second launch: all has been compiled, and nothing is done for the first time.
        chosen = ["--kernel-name", kernel, "--launch-skip", "1", "--launch-count", "1"]
        shown = ["--set", "full", "--page", "details", "--csv", "--log-file", str(log)]
        ncu = [str(tool), "--clock-control", "none", *chosen, *shown, *command]
        steps.append(Step(f"ncu {kernel}", ncu, floor=8))
    return steps


def sanitizer(setting: Setting, gate: Gate) -> Steps:
    """Return steps that run a few tests per kernel under memcheck; a dry run only collects."""
    chosen = ["-k", SANITIZED, KERNELS]
    if setting.dry:
        return [Step("sanitizer", pytest("--collect-only", *chosen))]
    tool = find_tool("compute-sanitizer")
    if tool is None:
        return [LeftOut("sanitizer", "no compute-sanitizer found: no kernel was checked by it")]
    checked = [tool, "--tool", "memcheck", "--error-exitcode", str(_SANITIZER_FAILED)]
    # Libraries ask the driver for what it may not have; that is no error of a kernel.
    checked += ["--report-api-errors", "no"]
    # What torch caches would hide reads past the end of a tensor.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # Which have been checked is to be seen where there was no time for all.
    record = ["-p", "suite.outcomes", "--outcomes", setting.output / "sanitizer.jsonl"]
    command = [*checked, *pytest("-m", "gpu", *record, *chosen)]
    return [Step("sanitizer", command, variables=variables)]
