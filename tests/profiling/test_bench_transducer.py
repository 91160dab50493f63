"""The transducer's peers at tiny sizes on a CPU; packages that are not there have doubles."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_ops
import pytest
import torch
from bench.contender import Case, error, judge
from bench.transducer import batch as transducer_batch
from bench.transducer import loss as transducer
from bench.transducer import packages as transducer_packages
from bench.transducer import torch_losses as transducer_torch
from bench.transducer.lattice import Nodes
from torch import Tensor

from effasr_kernels import PackedLayout

WORKLOAD = bench_ops.workloads(bench_ops.parse(["--device", "cpu"]))[0]
REALISTIC, TDT = transducer.cases(WORKLOAD)
LARGE = list(transducer.large(WORKLOAD))
APEX = ("apex packed float16", "apex packed float32")


def _batch(frames: list[int], labels: list[int]) -> transducer_batch.Batch:
    return transducer_batch.draw(WORKLOAD, frames, labels, joint=6, classes=9)


def _distance(case: Case, peer: str) -> float:
    return error(case.peers[peer]().outcome(), judge(case))


@pytest.mark.parametrize("peer", sorted(transducer.OWN))
def test_own_ways_agree_with_ours(peer: str) -> None:
    assert _distance(REALISTIC, peer) < 1e-5
    small = LARGE[0].small
    assert small is not None
    assert _distance(small, peer) < 1e-5


@pytest.mark.parametrize("rows", [1, 7, 1_000])
def test_tiles_of_any_size_agree(rows: int) -> None:
    batch = _batch([5, 1, 3], [2, 1, 4])
    whole = transducer_torch.chunked(batch, 1_000).outcome()
    for name, found in transducer_torch.chunked(batch, rows).outcome().items():
        torch.testing.assert_close(found, whole[name])


@pytest.mark.parametrize("size", [1, 2, None])
@pytest.mark.parametrize("loss", [transducer_torch.plain, transducer_torch.merged])
def test_sub_batches_of_any_size_agree_for_any_upstream(
    size: int | None, loss: transducer_torch.Loss
) -> None:
    batch = _batch([5, 1, 3], [2, 1, 0])
    upstream = [torch.tensor([1.0, -2.0, 0.5])]
    found = transducer_torch.padded(batch, loss, size=size)
    whole = transducer_torch.chunked(batch, 4)
    expected = replace(whole, upstream=upstream).outcome()
    for name, x in replace(found, upstream=upstream).outcome().items():
        torch.testing.assert_close(x, expected[name])


def test_places_of_nodes() -> None:
    frames, labels = (PackedLayout.from_lengths(lengths) for lengths in ([2, 1], [1, 2]))
    nodes = Nodes(frames, labels)
    found = torch.stack(nodes.places(1, nodes.count), 1).tolist()
    assert found == [[0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0], [1, 0, 1], [1, 0, 2]]


def test_work_of_a_large_batch_is_the_registered_one() -> None:
    gold = judge(REALISTIC)
    assert REALISTIC.small is None
    assert REALISTIC.flops is not None
    assert REALISTIC.flops() == gold.flops[0]
    nodes, joint, classes = 4 * 12 * 6, 8, 16
    large = judge(LARGE[0])
    assert large.flops == (2 * nodes * joint * classes, 6 * nodes * joint * classes)
    inputs = 4 * (4 * 12 * joint + 4 * 6 * joint + classes * (joint + 1))
    assert large.bytes == (inputs + 16, 3 * inputs + 32)
    assert large.outcome["encoded"].shape == (60 + 41 + 7, joint)


@pytest.mark.extended
def test_large_batches_are_measured_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--device", "cpu", "--op"]
    assert bench_ops.main([*run, "transducer_loss", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0].split()[1:] for line in shown[:2]] == [
        ["large", "8x"],
        ["large", "4x"],
    ]
    assert len(shown) == len(LARGE) + 2
    assert "peer: torch dense" in shown[0]
    assert bench_ops.main([*run, "ctc_loss", "--list"]) == 0
    assert "transducer" not in capsys.readouterr().out
    output = tmp_path / "ops.csv"
    assert bench_ops.main([*run, "transducer_loss", "--output", str(output)]) == 0
    with output.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    own = {f"peer: {name}" for name in transducer.OWN} | {"reference"}
    packages = {f"peer: {name}" for name in transducer.PEERS} | {"peer: transformers dense"}
    assert own <= {row["backend"] for row in rows} <= own | packages | {"cpp"}
    assert {row["kind"] for row in rows} == {"large 8x", "large 4x", "", "tdt"}
    rows = [row for row in rows if "float16" not in row["backend"]]
    assert all(float(row["error"]) < 1e-4 and float(row["tflop_per_s"]) > 0 for row in rows)
    said = capsys.readouterr().err
    measured = {row["backend"] for row in rows}
    for name in set(transducer.PEERS) - transducer.OWN:
        assert f"peer: {name}" in measured or f"peer: {name}: " in said
    assert "apex packed float16: ImportError: no package apex" in said


def test_what_does_not_fit_has_no_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(batch: transducer_batch.Batch) -> Any:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(transducer, "PEERS", {"dense": full})
    assert bench_ops.main(["--device", "cpu", "--op", "transducer_loss"]) == 0
    assert "peer: dense: OutOfMemoryError: CUDA error: out of memory" in capsys.readouterr().err


# Packages.


def _package(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / "apex" / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are found, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_the_other_apex_is_refused_and_not_imported(folder: Path) -> None:
    _package(folder, __init__="raise AssertionError('imported')", models="")
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="is not NVIDIA's, but the unrelated package"):
        transducer_packages.nvidia_apex()
    for peer in APEX:
        with pytest.raises(ImportError, match="unrelated package of that name on PyPI"):
            REALISTIC.peers[peer]()


def test_an_apex_without_the_transducer_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(folder, __init__="", contrib__in____init__="")
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="built without APEX_TRANSDUCER=1"):
        transducer_packages.nvidia_apex()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        # Not by monkeypatch, which would put it back.
        del sys.modules[name]


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _part(targets: Tensor, frames: Tensor, labels: Tensor, blank: int) -> transducer_torch.Part:
    """From what packages are given, which must be int32."""
    assert {targets.dtype, frames.dtype, labels.dtype} == {torch.int32}
    layouts = (PackedLayout.from_lengths(x.tolist()) for x in (frames, labels))
    return transducer_torch.Part(Nodes(*layouts), targets.long(), frames, labels, blank)


def _padded_double(
    logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int
) -> Tensor:
    assert logits.shape[1:3] == (int(frames.max()), int(labels.max()) + 1)
    assert targets.shape[1] == int(labels.max())
    return transducer_torch.plain(logits, _part(targets, frames, labels, blank))


def _packed_double(
    logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int
) -> Tensor:
    log_probs = logits.log_softmax(-1)
    nodes = _part(targets, frames, labels, blank).nodes
    sequence, _, state = nodes.places(0, nodes.count)
    label = torch.nn.functional.pad(targets, (0, 1)).long()
    label = label[nodes.labels.cu_seqlens.long()[sequence] + state]
    return nodes.losses(log_probs[:, blank], log_probs.gather(1, label[:, None])[:, 0])


def test_torchaudio_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def rnnt_loss(*given: Tensor, blank: int, reduction: str) -> Tensor:
        assert reduction == "none"
        return _padded_double(*given, blank)  # type: ignore[misc]

    _install(monkeypatch, "torchaudio")
    _install(monkeypatch, "torchaudio.functional", rnnt_loss=rnnt_loss)
    assert _distance(REALISTIC, "torchaudio float32") < 1e-5
    assert _distance(REALISTIC, "torchaudio float16") < 1e-2
    monkeypatch.setattr(transducer_batch.Batch, "padded_logits", 2**31)
    with pytest.raises(ValueError, match="2147483648 logits, but its offsets have 32 bits"):
        REALISTIC.peers["torchaudio float32"]()


def test_transformers_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    from transformers.utils import import_utils

    def rnnt_loss(
        *, logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor,
        blank: int, reduction: str,
    ) -> Tensor:  # fmt: skip
        assert reduction == "none"
        return _padded_double(logits, targets, logit_lengths, target_lengths, blank)

    functional = ModuleType("torchaudio.functional")
    vars(functional)["rnnt_loss"] = rnnt_loss
    _install(monkeypatch, "torchaudio", functional=functional)
    monkeypatch.setitem(import_utils.BACKENDS_MAPPING, "torchaudio", (lambda: True, ""))
    assert _distance(REALISTIC, "transformers float32") < 1e-5


def test_the_tdt_of_transformers_agrees_with_ours() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    assert _distance(TDT, "transformers dense") < 1e-5


def test_work_of_a_tdt_has_rows_for_durations() -> None:
    assert TDT.flops is not None
    assert REALISTIC.flops is not None
    classes, durations = WORKLOAD.widths.pieces, len(transducer.DURATIONS)
    assert TDT.flops() * classes == REALISTIC.flops() * (classes + durations)
    assert judge(TDT).outcome["bias"].shape == (classes + durations,)


def test_numba_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(blank: int, reduction: str) -> Callable[..., Tensor]:
        assert reduction == "none"
        return lambda *given: _padded_double(*given, blank)

    _install(monkeypatch, "warprnnt_numba", RNNTLossNumba=make)
    assert _distance(REALISTIC, "NeMo's way, warprnnt_numba") < 1e-5


def test_warp_rnnt_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def rnnt_loss(
        *given: Tensor, blank: int, gather: bool = False, compact: bool = False
    ) -> Tensor:
        assert gather is not compact
        return (_packed_double if compact else _padded_double)(*given, blank)  # type: ignore[arg-type]

    _install(monkeypatch, "warp_rnnt", rnnt_loss=rnnt_loss)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        REALISTIC.peers["warp_rnnt compact"]()
    monkeypatch.setattr(transducer_packages, "_need_gpu", lambda *_: None)
    assert _distance(REALISTIC, "warp_rnnt gather") < 1e-5
    assert _distance(REALISTIC, "warp_rnnt compact") < 1e-5


class _Joint:
    def __init__(self, *, pack_output: bool, relu: bool):
        assert pack_output
        assert relu

    def __call__(
        self,
        f: Tensor,
        g: Tensor,
        f_len: Tensor,
        g_len: Tensor,
        *,
        batch_offset: Tensor,
        packed_batch: int,
    ) -> Tensor:
        assert batch_offset.tolist() == (f_len * g_len).cumsum(0).tolist()
        assert packed_batch == batch_offset[-1]
        hidden = (f[:, :, None] + g[:, None]).relu()
        lengths = zip(f_len.tolist(), g_len.tolist(), strict=True)
        return torch.cat([hidden[n, :t, :u].flatten(0, 1) for n, (t, u) in enumerate(lengths)])


class _Loss:
    def __init__(self, *, packed_input: bool):
        assert packed_input

    def __call__(
        self,
        x: Tensor,
        label: Tensor,
        f_len: Tensor,
        y_len: Tensor,
        blank_idx: int,
        *,
        batch_offset: Tensor,
        max_f_len: int,
    ) -> Tensor:
        assert max_f_len == int(f_len.max())
        lengths = enumerate(y_len.tolist())
        packed = torch.cat([label[n, :u] for n, u in lengths])
        return _packed_double(x.float(), packed, f_len, y_len, blank_idx)


def test_apex_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("apex.contrib.transducer")
    vars(module).update(TransducerJoint=_Joint, TransducerLoss=_Loss)
    monkeypatch.setattr(transducer_packages, "nvidia_apex", lambda: module)
    with pytest.raises(RuntimeError, match="apex needs a GPU"):
        REALISTIC.peers[APEX[0]]()
    monkeypatch.setattr(transducer_packages, "_need_gpu", lambda *_: None)
    assert _distance(REALISTIC, APEX[0]) < 1e-2
    assert _distance(REALISTIC, APEX[1]) < 1e-5


@pytest.mark.extended
def test_pruning_is_timed_but_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def smoothed(*, lm: Tensor, am: Tensor, return_grad: bool, **given: Any) -> Any:
        assert return_grad
        assert given["symbols"].dtype == given["boundary"].dtype == torch.int64
        assert given["boundary"][:, 3].max() == am.shape[1]
        assert given["boundary"][:, 2].max() == lm.shape[1] - 1 == given["symbols"].shape[1]
        grads = torch.zeros(2, am.shape[0], lm.shape[1], am.shape[1])
        return am.mean((1, 2)) + lm.mean((1, 2)), (grads[0, :, 1:], grads[1])

    def ranges(*, px_grad: Tensor, py_grad: Tensor, boundary: Tensor, s_range: int) -> Tensor:
        return torch.arange(s_range).expand(py_grad.shape[0], py_grad.shape[2], s_range)

    def prune(*, am: Tensor, lm: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
        few = lm[:, None, : ranges.shape[2]]
        return am[:, :, None].expand(-1, -1, few.shape[2], -1), few.expand(-1, am.shape[1], -1, -1)

    def loss(*, logits: Tensor, ranges: Tensor, reduction: str, **_: Any) -> Tensor:
        assert reduction == "none"
        return logits.mean((1, 2, 3))

    _install(
        monkeypatch,
        "k2",
        rnnt_loss_smoothed=smoothed,
        get_rnnt_prune_ranges=ranges,
        do_rnnt_pruning=prune,
        rnnt_loss_pruned=loss,
    )
    output = tmp_path / "ops.csv"
    run = ["--device", "cpu", "--op", "transducer_loss"]
    assert bench_ops.main([*run, "--output", str(output)]) == 0
    with output.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "k2" in row["backend"]]
    assert len(rows) == 2 * (len(LARGE) + 1), "not of the TDT"
    assert {(row["error"], row["tflop_per_s"]) for row in rows} == {("approximate", "")}
