"""The parts of the suite: their calls, their order and their time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from suite import models, operations
from suite.gate import ANSWERING, GROUPS, INFERENCE, LOADER, TRAINING, Gate
from suite.parts import Part, Setting, Steps, environment, missing, tests
from suite.steps import LeftOut, Step


def _behind(
    name: str, uses: Sequence[str], needs: Sequence[str], make: Callable[[Setting, Gate], Steps]
) -> Callable[[Setting, Gate], Steps]:
    """Return the steps of a part if no test of what it uses has failed, and some have passed."""

    def steps(setting: Setting, gate: Gate) -> Steps:
        # Of what is not installed no test can pass.
        if reason := missing(needs):
            return [LeftOut(name, reason)]
        reasons = gate.reasons(uses)
        note = gate.note(uses)
        if reasons and not setting.unproven:
            first, *others = reasons
            more = f"; likewise {', '.join(others)}" if others else ""
            return [LeftOut(name, f"not measured: {first}: {reasons[first]}{more}", well=False)]
        aside = replace(setting, output=setting.output / "unproven") if reasons else setting
        made = make(aside, gate)
        return [replace(x, note=note) if isinstance(x, Step) else x for x in made]

    return steps


def _part(
    name: str,
    about: str,
    make: Callable[[Setting, Gate], Steps],
    calls: dict[int, tuple[float, float]],
    uses: Collection[str],
    needs: Sequence[str] = (),
) -> Part:
    made = _behind(name, tuple(uses), needs, make)
    return Part(name, about, made, calls, tuple(uses), tuple(needs))


_REAL = (*TRAINING, LOADER)
_EVERY_CALL = {call: (120.0, 0.0) for call in (1, 2, 3)}
PARTS = (
    Part("environment", "GPU, driver, versions, sources", environment, _EVERY_CALL),
    Part(
        "tests",
        "the GPU tests on which the call rests, but those that earlier calls have run",
        tests,
        {1: (200, 330), 2: (30, 60), 3: (30, 60)},
    ),
    Part(
        "warm up",
        "what the call measures, compiled on all cores",
        operations.warm_up,
        {1: (20, 20), 2: (50, 40), 3: (20, 20)},
    ),
    Part(
        "ops", "every operation against its peers", operations.operations, {1: (160, 200)}, GROUPS
    ),
    _part(
        "training",
        "canary_1b_flash and canary_180m_flash, eager, as a graph, compiled, and both",
        models.training,
        {2: (140, 120)},
        TRAINING,
    ),
    _part(
        "peers", "transformers' Canary, and padded batches", models.peers, {2: (50, 50)}, TRAINING
    ),
    _part("inference", "RTFx by decoder depth", models.inference, {2: (30, 30)}, INFERENCE),
    _part(
        "conversations",
        "tokens per second of a language model's answers",
        models.conversations,
        {2: (20, 20)},
        ANSWERING,
        needs=models.CONVERSATION_NEEDS,
    ),
    _part("memory", "memory over many steps", models.memory, {2: (20, 20)}, TRAINING),
    _part(
        "train",
        "a real run: data, checkpoints, resuming",
        models.real_training,
        {2: (60, 150)},
        _REAL,
        needs=models.REAL_NEEDS,
    ),
    _part(
        "profile", "some steps recorded, and the report", models.profile, {2: (20, 20)}, TRAINING
    ),
    _part(
        "transducer",
        "B 1024, T 500 and 1000, U 200, V 1024 and 4096; memory by the batch",
        operations.transducer,
        {3: (130, 120)},
        ["transducer_loss"],
    ),
    _part("wide heads", "attention at D 256", operations.wide_heads, {3: (30, 30)}, ["attention"]),
    Part(
        "ncu",
        "counters of the kernels that matter",
        operations.counters,
        {3: (60, 60)},
        sorted({op for op, _, _ in operations.MATTER}),
    ),
    Part(
        "sanitizer",
        "compute-sanitizer on tests of each kernel",
        operations.sanitizer,
        {3: (60, 60)},
    ),
)
"""Parts in order: those that others depend on first, then the most important."""
CALLS = (1, 2, 3)
