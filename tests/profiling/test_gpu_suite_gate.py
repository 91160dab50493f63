"""What the GPU suite measures, by what tests have shown of the operations that it uses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import bench_conversations
import bench_inference
import bench_ops
import bench_training
import pytest
from suite import calls, models, operations, parts, summary
from suite.gate import (
    ADAPTERS,
    ANSWERING,
    CONVERSATIONS,
    ENGINE,
    GOSSIP,
    GROUPS,
    INFERENCE,
    LOADER,
    MODEL,
    OPERATIONS,
    TRAINING,
    Gate,
    Group,
    groups_of,
    is_of,
)
from suite.parts import Setting
from suite.steps import LeftOut, Step

from effasr.data.features import log_mel
from effasr.model.language_model import fused
from effasr.nn import feed_forward, residual
from effasr.transcription import cpu_weights
from effasr_kernels.runtime import native
from effasr_kernels.runtime.torch_op import TorchOp
from tests.gpu.test_operations import CONTRACT

GREEN = Gate({name: Group(passed=3) for name in GROUPS})
RED = Group(passed=2, failed=["tests/gpu/test_x.py::test_y"])


def without(name: str, group: Group = RED) -> Gate:
    """All tests are green but those of one group."""
    return Gate(GREEN.groups | {name: group})


def planned(name: str, setting: Setting, gate: Gate = GREEN) -> dict[str, Step | LeftOut]:
    (part,) = [part for part in calls.PARTS if part.name == name]
    return {step.name: step for step in part.steps(setting, gate)}


def command(name: str, setting: Setting, gate: Gate = GREEN, step: str = "") -> list[str]:
    found = planned(name, setting, gate)[step or name]
    assert isinstance(found, Step)
    return list(found.command)


@pytest.mark.parametrize(
    ("test", "groups"),
    [
        ("tests/gpu/test_attention_relative.py::test_a[float32]", ("attention",)),
        ("tests/gpu/test_transducer_durations.py::test_a", ("transducer_loss",)),
        ("tests/ops/test_ctc_loss.py", ("ctc_loss",)),
        ("tests/gpu/test_launch.py::test_a", OPERATIONS),
        ("tests/gpu/test_operations.py::test_values[rms_norm-(5,), width=1]", ("rms_norm",)),
        ("tests/gpu/test_training.py::test_a", (MODEL,)),
        ("tests/model/test_on_gpu.py::test_a", (MODEL,)),
        ("tests/gpu/test_decoding_engine.py::test_a", (ENGINE,)),
        ("tests/data/test_loader.py::test_a", (LOADER,)),
        ("tests/gpu/test_conversations.py::test_a", (CONVERSATIONS,)),
        ("tests/training/calibration/test_conversations.py::test_a", (MODEL,)),
        # What fails of these closes nothing but rows of its own.
        ("tests/distributed/test_gossip_cuda.py::test_a", (GOSSIP,)),
        ("tests/ops/test_attention_packages.py::test_a[varlen-1]", ("attention: varlen",)),
        (
            "tests/ops/test_attention_packages.py::test_version_3_serves[one]",
            ("attention: flash_attn_3",),
        ),
        ("tests/ops/test_attention_packages.py", tuple(ADAPTERS)),
    ],
)
def test_what_a_test_proves(test: str, groups: tuple[str, ...]) -> None:
    assert groups_of(test) == groups


def test_what_operations_share_is_proven_for_those_that_use_it() -> None:
    assert groups_of("tests/gpu/test_projection.py::test_a") == (
        *("ctc_loss", "linear_cross_entropy", "transducer_loss"),
    )
    assert groups_of("tests/gpu/test_logarithm.py::test_a") == ("ctc_loss", "transducer_loss")


def test_every_operation_has_tests_on_a_gpu() -> None:
    for name in OPERATIONS:
        tests = [
            path for path in parts.KERNELS.glob("test_*.py") if groups_of(str(path)) == (name,)
        ]
        assert tests or name in CONTRACT, name


def write_outcomes(path: Path, collected: list[str], outcomes: dict[str, str]) -> Path:
    lines = [{"collected": collected}]
    lines += [{"test": test, "outcome": outcome} for test, outcome in outcomes.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_is_red_is_not_proven(tmp_path: Path) -> None:
    names = [f"tests/gpu/test_{name}.py::test_a" for name in ("ctc_loss", "attention", "guided")]
    outcomes = {names[0]: "failed", names[1]: "passed", "tests/gpu/test_depthwise.py": "failed"}
    path = write_outcomes(tmp_path / "a.jsonl", names, outcomes)
    # A process was killed while it wrote.
    path.write_text(path.read_text() + '{"test": "tests/gpu/test_ct')
    gate = Gate.read([path, tmp_path / "missing.jsonl"])
    assert gate.reasons(["attention"]) == {}
    wrong = gate.reasons(OPERATIONS)
    assert wrong["ctc_loss"] == f"1 of its tests failed, such as {names[0]}"
    # A file that could not even be imported.
    assert wrong["depthwise_conv"].startswith("1 of its tests failed")
    assert wrong["transducer_loss"] == "none of its tests has run: run the part tests"


def test_a_group_that_has_run_in_part_is_measured_and_said_so(tmp_path: Path) -> None:
    tests = [f"tests/gpu/test_attention.py::test_{n}" for n in range(60)]
    outcomes = dict.fromkeys(tests[:40], "passed") | {tests[40]: "skipped"}
    gate = Gate.read([write_outcomes(tmp_path / "a.jsonl", tests, outcomes)])
    assert gate.reasons(["attention"]) == {}
    assert gate.note(["attention"]) == "attention: 41 of 60 tests run, all green"
    assert "attention" in gate.lacking(GROUPS)
    assert gate.groups["attention"].verdict == "41 of 60 tests run, all green, 1 skipped"
    found = planned(
        "ops", Setting(tmp_path), Gate(GREEN.groups | {"attention": gate.groups["attention"]})
    )
    step = found["ops attention"]
    assert isinstance(step, Step)
    assert step.note == "attention: 41 of 60 tests run, all green"
    part = without("attention", gate.groups["attention"])
    (training,) = planned("training", Setting(tmp_path), part).values()
    assert isinstance(training, Step)
    assert training.note == "attention: 41 of 60 tests run, all green"
    text = summary.markdown([], {name: [] for name in summary.FILES}, {}, gate=part)
    name = "attention".ljust(max(map(len, GROUPS)))
    assert f"| {name} | 41 of 60 tests run, all green, 1 skipped |" in text
    # One that fails among them closes it.
    outcomes[tests[1]] = "failed"
    gate = Gate.read([write_outcomes(tmp_path / "a.jsonl", tests, outcomes)])
    assert "attention" in gate.reasons(GROUPS)
    assert gate.groups["attention"].verdict.endswith("39 passed, 1 skipped, 19 not reached")


def test_what_was_shown_counts_for_the_same_sources_alone(tmp_path: Path) -> None:
    key = {"fingerprint": "a", "device": "H200"}
    GREEN.save(tmp_path / "tests.json", key)
    assert is_of(tmp_path / "tests.json", key)
    assert not is_of(tmp_path / "tests.json", key | {"fingerprint": "b"})
    assert not is_of(tmp_path / "none.json", key)
    (tmp_path / "tests.json").write_text("{")
    assert not is_of(tmp_path / "tests.json", key)


def test_a_red_group_closes_what_uses_it_and_nothing_else(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    found = planned("ops", setting, without("attention"))
    left_out = found["ops attention"]
    assert isinstance(left_out, LeftOut)
    assert left_out.reason.startswith("not measured: 1 of its tests failed, such as tests/gpu")
    assert "attention tiles" not in found
    others = [f"ops {name}" for name in OPERATIONS if name != "attention"]
    assert all(isinstance(found[name], Step) for name in others)
    for name in ("training", "peers", "inference", "memory", "profile", "wide heads"):
        (only,) = planned(name, setting, without("attention")).values()
        assert isinstance(only, LeftOut), name
        assert not only.well
    transducer = planned("transducer", setting, without("attention")).values()
    assert all(isinstance(x, Step) for x in transducer)
    assert not any(isinstance(x, Step) for x in planned("ops", setting, Gate()).values())


@pytest.mark.parametrize(
    "name", ["guided_attention", "ctc_loss", "transducer_loss", CONVERSATIONS, GOSSIP, *ADAPTERS]
)
def test_training_does_not_rest_on_what_it_does_not_use(name: str, tmp_path: Path) -> None:
    for part in ("training", "peers", "inference", "memory", "profile"):
        found = planned(part, Setting(tmp_path), without(name)).values()
        assert all(isinstance(x, Step) for x in found), (part, name)


def test_what_is_not_proven_is_measured_elsewhere_on_request(tmp_path: Path) -> None:
    setting = Setting(tmp_path, unproven=True)
    aside = command("ops", setting, without("attention"), "ops attention")
    assert str(tmp_path / "unproven" / "ops.csv") in aside
    beside = command("ops", setting, without("attention"), "ops ctc_loss")
    assert str(tmp_path / "ops.csv") in beside
    moved = command("training", setting, without("attention"))
    assert str(tmp_path / "unproven" / "training.csv") in moved
    assert str(tmp_path / "training.csv") in command("training", setting)
    tiles = command("ops", setting, without("attention"), "attention tiles")
    assert str(tmp_path / "unproven" / "attention_tiles.csv") in tiles
    assert str(tmp_path / "attention_tiles.csv") in command("ops", setting, step="attention tiles")


def test_what_is_not_proven_is_compiled_and_counted_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "find_tool", lambda name: name)
    setting, red = Setting(tmp_path, unproven=True), without("attention")
    assert "attention" in command("warm up", setting, red)
    assert "attention" not in command("warm up", replace(setting, unproven=False), red)
    trains = replace(setting, trains=True)
    assert "canary_1b_flash" in command("warm up", trains, red)
    counted = command("ncu", setting, red, "ncu attention_forward")
    assert str(tmp_path / "unproven" / "ncu" / "attention_forward.csv") in counted
    beside = command("ncu", setting, red, "ncu convolve_backward")
    assert str(tmp_path / "ncu" / "convolve_backward.csv") in beside
    left_out = planned("ncu", replace(setting, unproven=False), red)["ncu attention_forward"]
    assert isinstance(left_out, LeftOut)


def test_conversations_rest_on_their_own_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "version", lambda name: "9")
    assert isinstance(planned("conversations", Setting(tmp_path))["conversations"], Step)
    for name in OPERATIONS:
        (only,) = planned("conversations", Setting(tmp_path), without(name)).values()
        assert isinstance(only, LeftOut) == (name in ANSWERING), name
    (only,) = planned("conversations", Setting(tmp_path), without(CONVERSATIONS)).values()
    assert isinstance(only, LeftOut)


def test_rows_of_an_adapter_whose_tests_failed_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    rows = [
        {"op": op, "backend": backend, "date": date}
        for op, backend, date in [
            # Of an earlier call, whose tests may have been others.
            ("attention", "varlen", "2025"),
            *[("attention", name, "2026") for name in ("triton", "varlen", "flash_attn_2")],
            ("transducer_loss", "triton", "2026"),
        ]
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, bench_ops.COLUMNS, restval="1")
        writer.writeheader()
        writer.writerows(rows)

    def backends(path: Path) -> list[str]:
        with path.open(newline="") as file:
            return [row["backend"] for row in csv.DictReader(file)]

    # A process was killed while it wrote.
    path.write_text(path.read_text() + "attention,")
    assert summary.set_aside(tmp_path, GREEN, "2026") == 0
    gate = without("attention: varlen")
    assert summary.set_aside(tmp_path, gate, "2026") == 1
    assert backends(path) == ["varlen", "triton", "flash_attn_2", "triton"]
    assert backends(tmp_path / "unproven" / "ops.csv") == ["varlen"]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations that are called."""
    found: set[str] = set()
    select = TorchOp.select

    def spy(self: TorchOp, *arguments: object, **options: object) -> object:
        found.add(self.name)
        return select(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchOp, "select", spy)
    return found


def test_a_step_uses_what_its_gate_asks_for(
    used: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A GPU joins what lies between products; here references compute it.
    for module in (residual, feed_forward):
        monkeypatch.setattr(module, "is_fused", lambda x: True)
    # Nor are windows of audio copied one utterance at a time there.
    monkeypatch.setattr(log_mel, "_runs_on_host", lambda audio, frames: False)
    # Nor are weights packed on one, whose networks have no operation of ours.
    monkeypatch.setattr(cpu_weights, "_can_be_blocked", lambda weight: False)
    tiny = [*models.TINY, "--steps", "1", "--systems", "packed_static"]
    assert bench_training.main(tiny) == 0
    assert used == set(TRAINING) - {MODEL}
    used.clear()
    tiny = ["--size", "tiny", "--shapes", "1/1", "--batch", "2", "--longest", "3", "--repeats", "1"]
    assert bench_inference.main(tiny) == 0
    # On a GPU keys and values are paged; on a CPU attention is dense, or steps are in C++.
    assert used <= set(INFERENCE)
    unused = set(INFERENCE) - used - {MODEL, ENGINE}
    in_cpp = {"projected_top_k"} if native.unsupported_reason() is None else set()
    assert unused == {"append_to_pages", "decode_attention"} | in_cpp
    capsys.readouterr()


def test_answers_use_what_their_gate_asks_for(
    used: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    # As on a GPU.
    monkeypatch.setattr(fused, "is_fused", lambda x: True)
    tiny = ["--size", "tiny", "--conversations", "2", "--slots", "2", "--repeats", "1"]
    assert bench_conversations.main([*tiny, "--caches", "paged", "contiguous"]) == 0
    assert used == set(ANSWERING) - {CONVERSATIONS}
    capsys.readouterr()


def test_tests_of_the_data_need_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, _ = parts.gpu_tests()
    assert parts.TESTS / "model" / "test_on_gpu.py" in found
    # What most rows rest on begins.
    assert groups_of(str(found[0])) == OPERATIONS or groups_of(str(found[0])) == ("attention",)
    assert found[-1].name in ("test_gossip_cuda.py", "test_loader.py", "test_attention_packages.py")
    for name in ("data/test_a.py", "nn/test_b.py", "nn/test_c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "c" in name else f"pytest.{'mark'}.gpu")
    monkeypatch.setattr(parts, "TESTS", tmp_path)
    monkeypatch.setattr(parts, "KERNELS", tmp_path / "gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, left_out = parts.gpu_tests()
    assert found == [tmp_path / "nn/test_b.py"]
    assert left_out == [LeftOut("test_a.py", f"needs {', '.join(parts.DATA_PACKAGES)}")]
    assert parts.parallel() == []


def test_a_later_call_runs_only_the_tests_that_it_rests_on_and_that_lack(tmp_path: Path) -> None:
    setting = Setting(tmp_path, wanted=(*TRAINING, ENGINE))
    (only,) = planned("tests", setting, GREEN).values()
    assert only == LeftOut("tests", parts.TESTED)
    gate = without("depthwise_conv", Group(passed=1, unfinished=2))
    files = [Path(x) for x in command("tests", setting, gate) if x.endswith(".py")]
    assert parts.KERNELS / "test_depthwise_conv.py" in files
    assert all("depthwise_conv" in groups_of(str(path)) for path in files)
    # A red one stays red on the same sources.
    (only,) = planned("tests", setting, without("attention")).values()
    assert isinstance(only, LeftOut)
    every = [Path(x) for x in command("tests", Setting(tmp_path), Gate()) if x.endswith(".py")]
    assert {name for path in every for name in groups_of(str(path))} == set(GROUPS)


def test_tests_run_side_by_side_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert parts.parallel()[:4] == ["-n", "12", "--dist", "load"]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert parts.parallel()[:2] == ["-n", "1"]


def test_an_interpreter_that_does_not_work_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.5.2"}
    monkeypatch.setattr(parts, "version", lambda name: versions[name])
    assert (
        "the interpreter of triton 3.6.0 does not work with numpy 2.5.2" in parts.no_interpreter()
    )
    found = planned("ops", Setting(tmp_path, dry=True))["ops interpreted"]
    assert isinstance(found, LeftOut)
    assert found.well
    for other in ({"triton": "3.7.1"}, {"numpy": "2.3.5"}):
        monkeypatch.setattr(parts, "version", lambda name, other=other: (versions | other)[name])
        assert parts.no_interpreter() == ""
        assert isinstance(planned("ops", Setting(tmp_path, dry=True))["ops interpreted"], Step)


def test_operations_import_names_that_exist() -> None:
    assert {op for op, _, _ in operations.MATTER} <= set(OPERATIONS)
