"""Benchmarks of operations at tiny sizes on a CPU: peers compute the same, and rows are right."""

import importlib
import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import harness, operations, ops, transducer
from benchmarks.contender import Case, Contender, error, judge
from benchmarks.workload import LISTED, read_durations
from torch import Tensor

from effasr_kernels import OPERATIONS, PackedLayout, attention

MODULES = {
    **{"Liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"},
    **{"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"},
    **{"flash_attn_4": "flash_attn.cute", "transformers dense": "transformers"},
    **{"torchaudio float16": "torchaudio", "torchaudio float32": "torchaudio"},
}
"""What peers that are packages are imported from."""
ON_GPU_ALONE = {
    *("cut-cross-entropy", "flash_attn_2", "flash_attn_3", "flash_attn_4"),
}
INTERPRETED = {"Liger"}
"""Kernels that Triton's interpreter runs, too."""
OWN = {"FlashRNNT's way, in torch", "torch dense"}
"""Ways to a transducer's loss that need no package."""
CPU = ["--device", "cpu"]
WORKLOAD = ops.workloads(ops.parse(CPU))[0]
CASES = [case for group in ops.GROUPS for case in group(WORKLOAD)]
PEERS = [(case, peer) for case in CASES for peer in case.peers]
WITHOUT_DROPOUT = {case.name: case for case in operations.between(WORKLOAD, dropout=0.0)}
"""Cases whose peers drop other elements than ours, so that they agree without dropout alone."""
RNNT, TDT = transducer.cases(WORKLOAD)
LARGE = list(transducer.large(WORKLOAD))


def _id(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def test_every_operation_has_a_case() -> None:
    assert {case.op for case in CASES} == set(OPERATIONS)
    assert {peer for _, peer in PEERS} >= {*MODULES, "torch varlen_attn", "torch flex_attention"}
    packages = (transducer.PEERS.keys() | transducer.TDT_PEERS.keys()) - OWN
    assert packages <= MODULES.keys()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _varlen_double(
    query: Tensor, key: Tensor, value: Tensor, *sizes: Any, window_size: tuple[int, int]
) -> Tensor:
    def layout(cu_seqlens: Tensor, longest: int) -> PackedLayout:
        made = PackedLayout(cu_seqlens, cu_seqlens.tolist(), int(cu_seqlens[-1]))
        assert made.max_seqlen == longest
        assert 0 not in made.lengths
        return made

    layouts = (layout(sizes[i], sizes[i + 2]) for i in range(2))
    return attention(query, key, value, *layouts, causal=window_size == (-1, 0))


@pytest.mark.parametrize(("case", "peer"), PEERS, ids=_id)
def test_peers_compute_the_same(case: Case, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _varlen_double)
    # The default backend writes and compiles C++, which takes minutes.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = WITHOUT_DROPOUT.get(case.name, case)
    gold = judge(case)
    if peer in MODULES and not _is_installed(MODULES[peer]):
        with pytest.raises(ImportError):
            case.peers[peer]().outcome()
    elif peer in ON_GPU_ALONE:
        pytest.skip(f"{peer} needs a GPU")
    elif peer in INTERPRETED and "TRITON_INTERPRET" not in os.environ:
        pytest.skip(f"{peer} needs a GPU, or TRITON_INTERPRET=1")
    elif peer == "torch flex_attention":
        # On a CPU it has no backward.
        contender = case.peers[peer]()
        for leaf in contender.leaves.values():
            leaf.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            (result,) = contender.results()
        torch.testing.assert_close(contender.packed("result 0", result), gold.outcome["result 0"])
    else:
        contender = case.peers[peer]()
        assert contender.exact
        assert error(contender.outcome(), gold) < (1e-2 if "float16" in peer else 1e-4)


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_work_is_that_of_the_sequences(case: Case) -> None:
    gold = judge(case)
    forward, both = gold.flops
    assert gold.bytes[0] > 0
    if case.ours("reference").upstream:
        assert both == 3 * forward
        assert gold.bytes[0] < gold.bytes[1]
    else:
        assert (both, gold.bytes[1]) == (0, 0)
    if case.name == "attention":
        pairs = sum(length**2 for length in WORKLOAD.lengths[0])
        assert forward == 4 * pairs * WORKLOAD.width


def test_error_is_relative_and_infinite_for_nan() -> None:
    gold = replace(judge(CASES[1]), outcome={"y": torch.tensor([3.0, 4.0])})
    assert error({"y": torch.tensor([3.0, 4.5])}, gold) == pytest.approx(0.1)
    assert error({"y": torch.tensor([3.0, torch.nan])}, gold) == float("inf")
    with pytest.raises(ValueError, match=r"y is \(1,\), not \(2,\)"):
        error({"y": torch.ones(1)}, gold)


@pytest.mark.parametrize(("sequences", "count"), [(None, 3_000), (1, None)])
def test_a_batch_fills_its_static_shape(sequences: int | None, count: int | None) -> None:
    big = replace(WORKLOAD, rows=24_000, durations=read_durations(LISTED), sequences=sequences)
    frames, tokens = big.frame_layout, big.token_layout
    assert frames.rows == frames.total == 24_000
    assert 0.5 * big.tokens < tokens.total <= tokens.rows == big.tokens
    assert frames.num_sequences == tokens.num_sequences == (count or len(big.lengths[0]))
    assert frames.max_seqlen <= frames.max_seqlen_bound == 500
    # All can be aligned, or CTC would compare infinities.
    assert all(2 * u <= t or u == 1 for t, u in zip(*big.lengths, strict=True))


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_appended_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "RESULTS", tmp_path / "none.csv")
    output = tmp_path / "new" / "ops.csv"
    run = [*CPU, "--op", "depthwise_conv"]
    assert ops.main([*run, "--output", str(output)]) == 0
    first = list(harness.read(output))
    assert tuple(first[0]) == ops.COLUMNS
    expected = 2 * ["peer: torch conv1d padded", "reference"]
    assert [row["backend"] for row in first if row["mode"] == "forward"] == expected
    assert {row["mode"] for row in first} == {"forward", "forward+backward"}
    for row in first:
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"])
        assert float(row["tflop_per_s"]) > 0
        assert float(row["gb_per_s"]) > 0
        assert float(row["error"]) < 1e-4
        assert row["torch"] == torch.__version__
        assert row["device"].startswith("cpu")
    visible = capsys.readouterr()
    assert "Time as a multiple of ours" in visible.out
    assert "1.00  reference" in visible.out
    assert "triton: BackendUnavailable" in visible.err
    assert ops.main([*run, "--no-peers", "--output", str(output)]) == 0
    assert len(list(harness.read(output))) == len(first) + 4
    assert ops.main([*run, "--no-peers"]) == 0
    assert "none kept" in capsys.readouterr().out
    assert not (tmp_path / "none.csv").exists()


def test_a_spent_budget_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main([*CPU, "--budget-s", "0"]) == 1
    visible = capsys.readouterr()
    assert visible.err.count("the budget is spent") == len(CASES)
    assert visible.out.endswith("0 rows; none kept, without --output\n")


def _contender(call: Callable[[Tensor], Tensor]) -> Contender:
    x = torch.ones(3, requires_grad=True)
    return Contender({"x": x}, lambda: call(x), [torch.ones(3)])


def _measured(peers: dict[str, Callable[[], Contender]], seconds: float = 30.0) -> list[str]:
    case = Case("depthwise_conv", "", "x=3", lambda backend: _contender(lambda x: 2 * x), peers)
    limits = ops.Limits(time.monotonic() + 60, seconds, 0.01, 3)
    return [str(row["backend"]) for row in ops.rows_of(case, WORKLOAD, limits, ops.parse(CPU))]


def _missing() -> Contender:
    raise ImportError("\nthe package needs\nanother one")


def test_what_computes_something_else_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {
        "absent": _missing,
        "wrong": lambda: _contender(lambda x: 2.1 * x),
        "right": lambda: _contender(lambda x: x + x),
    }
    backends = _measured(peers)
    assert backends[-4:] == ["peer: right", "peer: right", "reference", "reference"]
    assert not {"peer: absent", "peer: wrong"} & set(backends)
    visible = capsys.readouterr().err
    assert "peer: absent: ImportError: the package needs another one" in visible
    assert "peer: wrong: ValueError: differs from the reference by 0.05" in visible


def test_what_takes_too_long_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(30)
        return 2 * x

    begin = time.monotonic()
    assert "peer: slow" not in _measured({"slow": lambda: _contender(slow)}, seconds=0.5)
    assert time.monotonic() - begin < 20
    visible = capsys.readouterr().err
    assert "peer: slow: OutOfTime" in visible
    assert "reference: no time left" in visible


# --- the transducer's peers -----------------------------------------------------------------------


def test_work_of_a_large_batch_is_the_registered_one() -> None:
    gold = judge(RNNT)
    assert RNNT.small is None
    assert RNNT.flops is not None
    assert RNNT.flops() == gold.flops[0]
    nodes, joint, classes = 4 * 12 * 6, 8, 16
    large = judge(LARGE[0])
    assert large.flops == (2 * nodes * joint * classes, 6 * nodes * joint * classes)
    inputs = 4 * (4 * 12 * joint + 4 * 6 * joint + classes * (joint + 1))
    assert large.bytes == (inputs + 16, 3 * inputs + 32)
    assert large.outcome["encoded"].shape == (60 + 41 + 7, joint)
    assert TDT.flops is not None
    classes, durations = WORKLOAD.widths.pieces, len(transducer.DURATIONS)
    assert TDT.flops() * classes == RNNT.flops() * (classes + durations)
    assert judge(TDT).outcome["bias"].shape == (classes + durations,)
