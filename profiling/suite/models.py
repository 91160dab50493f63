"""Models: training in every mode, against others, inference, memory, and a real run."""

from __future__ import annotations

from suite.gate import Gate
from suite.parts import DATA_PACKAGES, PROFILING, Setting, Steps
from suite.steps import LeftOut, Step

MODELS = ("canary_1b_flash", "canary_180m_flash")
MODES = ("eager", "graph", "compile", "graph_compile")
FRAME_BUDGET = ("--frame-budget", "8448")
"""Two full waves of tiles on the 132 multiprocessors of an H200."""
PEER = ("transformers>=5.23",)
"""The first with Canary."""
CONVERSATION_NEEDS = ("transformers>=5", "sentencepiece")
REAL_NEEDS = (*DATA_PACKAGES, "jiwer", "nvtx")
"""Packages that `effasr train` imports in addition to the suite's."""
NOTHING_HERE = 3
"""Exit code of `bench_training.py` where nothing can be measured on this machine."""
TINY = ["--model", "small", "--frame-budget", "100", "--utterances", "60", "--longest", "4"]


def compiled(setting: Setting, model: str) -> Step:
    """A step of a whole model under torch.compile, whose cache on the disk is all that stays."""
    chosen = ["--model", model, "--modes", "compile", "--systems", "packed_static", "--steps", "1"]
    command = setting.script("bench_training.py", *chosen, *FRAME_BUDGET)
    return Step(f"warm up {model}", command, beside=True, nothing=NOTHING_HERE)


def training(setting: Setting, gate: Gate) -> Steps:
    """Return the step in every mode, and where its time goes."""
    output = ["--output", setting.output / "training.csv", "--categories"]
    command = setting.script("bench_training.py", *output, "--systems", "packed_static")
    if setting.dry:
        few = [*TINY, "--steps", "2", "--modes", "eager", "graph"]
        return [
            Step("training", [*command, *few], budget="--budget-s"),
            LeftOut("training compile", "left out of a dry run: its tests run it"),
        ]
    matrix = [*command, "--model", *MODELS, "--modes", *MODES, *FRAME_BUDGET]
    return [Step("training", matrix, budget="--budget-s", nothing=NOTHING_HERE)]


def peers(setting: Setting, gate: Gate) -> Steps:
    """Return the same step of transformers' Canary, and of other ways of batching."""
    command = setting.script("bench_training.py", "--output", setting.output / "training.csv")
    if setting.dry:
        systems = ["--systems", "random", "packed"]
        return [
            Step("training others", [*command, *TINY, "--steps", "2", *systems]),
            LeftOut("training peer", "left out of a dry run: its tests run it"),
        ]
    size = ["--model", "canary_180m_flash", *FRAME_BUDGET]
    peer = [*command, *size, "--systems", "transformers", "--steps", "6"]
    others = [*command, *size, "--systems", "random", "packed", "--steps", "10"]
    told = {"budget": "--budget-s", "nothing": NOTHING_HERE}
    return [
        Step("training peer", peer, weight=3, needs=PEER, **told),
        Step("training others", others, weight=2, **told),
    ]


def inference(setting: Setting, gate: Gate) -> Steps:
    """RTFx by decoder depth."""
    command = setting.script("bench_inference.py", "--output", setting.output / "inference.csv")
    if setting.dry:
        tiny = ["--size", "tiny", "--shapes", "2/1", "1/2", "--batch", "2", "--longest", "3"]
        return [
            Step("inference", [*command, *tiny, "--repeats", "1"]),
            LeftOut("inference peer", "left out of a dry run: its tests run it"),
        ]
    return [
        Step("inference", [*command, "--shapes", "24/24", "32/4"], weight=3),
        Step("inference peer", [*command, "--peer", "--shapes", "17/4"], weight=2, needs=PEER),
        Step("inference more", [*command, "--shapes", "17/4", "18/8"], weight=2),
    ]


def conversations(setting: Setting, gate: Gate) -> Steps:
    """Answers of a language model."""
    if setting.dry:
        return [LeftOut("conversations", "left out of a dry run: its tests run it")]
    output = ["--output", setting.output / "conversations.csv"]
    both = ["--caches", "paged", "contiguous", "--peer", "--answers", "replies"]
    return [Step("conversations", setting.script("bench_conversations.py", *output, *both))]


def memory(setting: Setting, gate: Gate) -> Steps:
    """Memory over many steps."""
    command = setting.script("studies/memory_trace.py", "--output", setting.output / "memory.csv")
    return [Step("memory", [*command, *TINY, "--steps", "6"] if setting.dry else command)]


def real_training(setting: Setting, gate: Gate) -> Steps:
    """Return steps that run `effasr train` on a corpus made for it."""
    script = PROFILING / "train_on_gpu.py"
    if not script.exists():
        return [LeftOut("train", f"{script.name} is not in this checkout", well=False)]
    dry = ["--dry-run"] if setting.dry else []
    command = setting.script(script.name, "--output", setting.output / "train", *dry)
    return [Step("train", command, budget="--minutes")]


def profile(setting: Setting, gate: Gate) -> Steps:
    """Return a recorded step, and its report."""
    folder = setting.output / "profile"
    record = ["--profile", folder, "--systems", "packed_static"]
    tiny = [*TINY, "--steps", "2"] if setting.dry else ["--steps", "3"]
    report = ["report.py", folder / "packed_static" / "rank0.json.gz"]
    return [
        Step("profile", setting.script("bench_training.py", *record, *tiny), weight=3),
        Step("report", setting.script(*report, "--output", setting.output / "report")),
    ]
