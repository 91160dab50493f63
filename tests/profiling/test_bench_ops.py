"""The benchmark at tiny sizes on a CPU: its peers compute the same, and its rows are right."""

from __future__ import annotations

import csv
import importlib.util
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bench_ops
import pytest
import torch
from bench import timing
from bench.contender import Case, Contender, Padding, error, judge
from bench.operations import between, losses
from bench.transducer import loss as transducer
from bench.workload import LISTED, Widths, drawn_durations, read_durations
from torch import Tensor

from effasr_kernels import OPERATIONS, PackedLayout, attention, pack

MODULES = {
    **{"Liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"},
    **{"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"},
    **{"flash_attn_4": "flash_attn.cute", "transformers dense": "transformers"},
    **{"flash-attn layer_norm_fn": "flash_attn"},
    **{"transformers float32": "torchaudio", "NeMo's way, warprnnt_numba": "warprnnt_numba"},
    **{"torchaudio float16": "torchaudio", "torchaudio float32": "torchaudio"},
    **{"warp_rnnt compact": "warp_rnnt", "warp_rnnt gather": "warp_rnnt"},
    **{"apex packed float16": "apex", "apex packed float32": "apex"},
    **{"k2 pruned (approximate)": "k2", "fast_rnnt pruned (approximate)": "fast_rnnt"},
}
"""What peers that are packages are imported from."""
ON_GPU_ALONE = {
    *("cut-cross-entropy", "flash_attn_2", "flash_attn_3", "flash_attn_4", "warp_rnnt compact"),
    *("apex packed float16", "apex packed float32", "flash-attn layer_norm_fn"),
}
INTERPRETED = {"Liger"}
"""Kernels that Triton's interpreter runs, too."""
ON_GPU = {"torch varlen_attn", "torch flex_attention"}
WORKLOAD = bench_ops.workloads(bench_ops.parse(["--device", "cpu"]))[0]
CASES = [case for group in bench_ops.GROUPS for case in group(WORKLOAD)]
PEERS = [(case, peer) for case in CASES for peer in case.peers]
WITHOUT_DROPOUT = {case.name: case for case in between.cases(WORKLOAD, dropout=0.0)}
"""Cases whose peers drop other elements than ours, so that they agree without dropout alone."""


def _id(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


def test_every_operation_has_a_case() -> None:
    assert {case.op for case in CASES} == set(OPERATIONS)
    assert {peer for _, peer in PEERS} >= MODULES.keys() | ON_GPU
    packages = (transducer.PEERS.keys() | transducer.TDT_PEERS.keys()) - transducer.OWN
    assert packages <= MODULES.keys()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _varlen_double(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    def layout(cu_seqlens: Tensor, longest: int) -> PackedLayout:
        found = PackedLayout(cu_seqlens, cu_seqlens.tolist(), int(cu_seqlens[-1]))
        assert found.max_seqlen == longest
        assert 0 not in found.lengths
        return found

    layouts = layout(cu_seq_q, max_q), layout(cu_seq_k, max_k)
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
    elif "approximate" in peer:
        pytest.skip(f"{peer} computes another value")
    elif peer == "torch flex_attention":
        # On a CPU it has no backward.
        contender = case.peers[peer]()
        for leaf in contender.leaves.values():
            leaf.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            (found,) = contender.results()
        torch.testing.assert_close(contender.packed("result 0", found), gold.outcome["result 0"])
    else:
        most = 1e-2 if "float16" in peer else 1e-4
        contender = case.peers[peer]()
        assert contender.exact
        assert error(contender.outcome(), gold) < most


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_work_is_that_of_the_sequences(case: Case) -> None:
    gold = judge(case)
    forward, both = gold.flops
    assert gold.bytes[0] > 0
    if case.ours("reference").differentiable:
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


def test_the_cross_entropy_of_speech_comes_first() -> None:
    gpu = replace(WORKLOAD, rows=24_000, durations=read_durations(LISTED), widths=Widths())
    (first, *_) = losses.cases(replace(gpu, head_width=2))
    assert (first.name, first.shape) == ("linear_cross_entropy speech", "U=2560 C=16 V=5248")
    assert {"torch eager", "torch chunked", "Liger", "cut-cross-entropy"} <= first.peers.keys()


def test_padding_there_and_back() -> None:
    packed = pack([torch.randn(n, 2) for n in (2, 0, 3)], rows=7, num_sequences=5)
    padding = Padding(packed.layout)
    padded = padding.pad(packed.values)
    assert padded.shape == (2, 3, 2)
    assert torch.equal(padded[0, 2], torch.zeros(2))
    assert torch.equal(padding.pack(padded), packed.values)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ops, "RESULTS", tmp_path / "none.csv")
    output = tmp_path / "new" / "ops.csv"
    run = ["--device", "cpu", "--op", "depthwise_conv"]
    assert bench_ops.main([*run, "--output", str(output)]) == 0
    first = _rows(output)
    assert list(first[0]) == bench_ops.COLUMNS
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
    shown = capsys.readouterr()
    assert "Time as a multiple of ours" in shown.out
    assert "1.00  reference" in shown.out
    assert "triton: BackendUnavailable" in shown.err

    assert bench_ops.main([*run, "--no-peers", "--output", str(output)]) == 0
    assert len(_rows(output)) == len(first) + 4
    assert bench_ops.main([*run, "--no-peers"]) == 0
    assert "none kept" in capsys.readouterr().out
    assert not (tmp_path / "none.csv").exists()


def test_the_list_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ops, "measure", None)
    assert bench_ops.main(["--device", "cpu", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(CASES)
    assert "peer: NeMo (sdpa with bias)" in shown[0]


def test_an_unknown_operation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops.main(["--device", "cpu", "--op", "atention"]) == 2
    assert "but is atention." in capsys.readouterr().err


def test_a_spent_budget_ends_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops.main(["--device", "cpu", "--budget-s", "0"]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("the budget is spent") == len(CASES)
    assert shown.out.endswith("0 rows; none kept, without --output\n")


def _case(peers: dict[str, Callable[[], Contender]]) -> Case:
    x = torch.ones(3, requires_grad=True)

    def ours(backend: str) -> Contender:
        return Contender({"x": x}, lambda: 2 * x, [torch.ones(3)])

    return Case("depthwise_conv", "", "x=3", ours, peers)


def _contender(call: Callable[[Tensor], Tensor]) -> Contender:
    x = torch.ones(3, requires_grad=True)
    return Contender({"x": x}, lambda: call(x), [torch.ones(3)])


def _measured(case: Case, seconds: float = 30.0) -> list[str]:
    limits = bench_ops.Limits(time.monotonic() + 60, seconds, 0.01, 3)
    options = bench_ops.parse(["--device", "cpu"])
    return [str(row["backend"]) for row in bench_ops.rows_of(case, WORKLOAD, limits, options)]


def test_what_computes_something_else_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> Contender:
        raise ImportError("no such package")

    peers = {
        "absent": missing,
        "wrong": lambda: _contender(lambda x: 2.1 * x),
        "right": lambda: _contender(lambda x: x + x),
    }
    found = _measured(_case(peers))
    assert found[-4:] == ["peer: right", "peer: right", "reference", "reference"]
    assert not {"peer: absent", "peer: wrong"} & set(found)
    said = capsys.readouterr().err
    assert "peer: absent: ImportError: no such package" in said
    assert "peer: wrong: ValueError: differs from the reference by 0.05" in said


def test_what_is_not_installed_is_listed_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Contender:
        raise ImportError("\nthe package needs\nanother one")

    (case,) = (case for case in CASES if case.name == "guided_attention")
    again = replace(case, peers={"absent": missing})
    monkeypatch.setattr(bench_ops, "GROUPS", (lambda workload: [again],))
    assert bench_ops.main(["--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "left out: absent: ImportError: the package needs another one\n" in shown


def test_what_takes_too_long_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(30)
        return 2 * x

    begin = time.monotonic()
    found = _measured(_case({"slow": lambda: _contender(slow)}), seconds=0.5)
    assert time.monotonic() - begin < 20
    assert "peer: slow" not in found
    said = capsys.readouterr().err
    assert "peer: slow: OutOfTime" in said
    assert "reference: no time left" in said


def test_a_gpu_in_disorder_ends_all() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        _measured(_case({"broken": lambda: _contender(broken)}))


def test_a_clock_for_a_cpu() -> None:
    calls = []
    found = timing.measure(
        lambda: calls.append(0), torch.device("cpu"), repeats=7, warmup=2, seconds=5
    )
    assert len(calls) == 9
    assert found.p20 <= found.p50 <= found.p80
    assert found.peak_bytes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"duration": 1.5, "text": "x"}\n\n{"duration": 2}\n'),
        ("a.tsv", "duration_seconds\tid\n1.5\ta\n2\tb\n"),
        ("a.txt", "# seconds\n1.5\n2\n"),
    ],
)
def test_reads_lengths(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_durations(tmp_path / name) == [1.5, 2.0]


def test_lengths_are_real_ones_or_look_like_them(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="has no durations"):
        read_durations(tmp_path / "empty.txt")
    listed = read_durations(LISTED)
    assert len(listed) == 400
    assert sum(listed) / 400 == pytest.approx(7.17, abs=0.01)
    assert sum(drawn_durations()) / 2_000 == pytest.approx(7.4, rel=0.1)


@pytest.mark.parametrize(("sequences", "places"), [(None, 3_000), (1, None)])
def test_a_batch_fills_its_static_shape(sequences: int | None, places: int | None) -> None:
    big = replace(WORKLOAD, rows=24_000, durations=read_durations(LISTED), sequences=sequences)
    frames, tokens = big.frame_layout, big.token_layout
    assert frames.rows == frames.total == 24_000
    assert 0.5 * big.tokens < tokens.total <= tokens.rows == big.tokens
    assert frames.num_sequences == tokens.num_sequences == (places or len(big.lengths[0]))
    assert frames.max_seqlen <= frames.max_seqlen_bound == 500
    # All can be aligned, or CTC would compare infinities.
    assert all(2 * u <= t or u == 1 for t, u in zip(*big.lengths, strict=True))


@pytest.mark.parametrize(("budget", "case"), [(80, 10), (200, 25), (420, 45)])
def test_a_small_budget_is_for_more_than_one_operation(budget: float, case: float) -> None:
    assert bench_ops.parse(["--budget-s", str(budget)]).case_s == case
    assert bench_ops.parse(["--budget-s", str(budget), "--case-s", "3"]).case_s == 3
