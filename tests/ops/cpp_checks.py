"""The backend ``cpp`` against the references; run by `test_cpp.py`, in a process of its own.

The library of this process is that of the folder EFFASR_EXTENSION: once loaded it is not replaced.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels import BackendUnavailable, PackedLayout, TorchOp, ctc_loss, transducer_loss
from effasr_kernels.ctc_loss import OPERATION as ctc_op
from effasr_kernels.ctc_loss import CtcArguments
from effasr_kernels.ctc_loss import _cpp as ctc_cpp
from effasr_kernels.testing.conformance import check_kernel
from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS
from effasr_kernels.transducer_loss import OPERATION as transducer_op
from effasr_kernels.transducer_loss import TransducerArguments, _cpp, set_workspace
from tests.gpu.live_memory import Live
from tests.ops.cpp_calls import (
    WIDTH,
    Arguments,
    Run,
    assert_agrees,
    case_for,
    ctc,
    gradients,
    transducer,
    wide,
)

effasr_kernels.__path__.append(os.path.join(os.environ["EFFASR_EXTENSION"], "effasr_kernels"))

DTYPES = torch.float32, torch.bfloat16, torch.float16


BOTH = pytest.mark.parametrize(
    ("run", "make"), [(transducer_loss, transducer), (ctc_loss, ctc)], ids=["transducer", "ctc"]
)


@BOTH
@pytest.mark.parametrize("name", AWKWARD_LENGTHS)
def test_agrees_with_the_definition(run: Run, make: Callable[..., Arguments], name: str) -> None:
    """And keeps the contract; upstream gradients differ. The last of a batch may be infeasible."""
    frames = AWKWARD_LENGTHS[name]
    transcripts = [(n + 2) // 3 for n in frames]
    transcripts[-1] = frames[-1] + 1 if frames[-1] else 0
    check_kernel(case_for(run, make, frames, transcripts), torch.float32, backend="cpp")


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_in_every_dtype(
    run: Run, make: Callable[..., Arguments], dtype: torch.dtype
) -> None:
    check_kernel(case_for(run, make, (9, 0, 30), (3, 0, 4)), dtype, backend="cpp")


def test_the_joint_is_rounded_as_a_layer_would() -> None:
    for dtype in DTYPES[1:]:
        arguments = transducer((9, 0, 30), (3, 0, 4), dtype=dtype)
        losses = [transducer_loss(**arguments, backend=x) for x in ("cpp", "reference")]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


@BOTH
def test_one_upstream_gradient_scales_what_the_forward_left(
    run: Run, make: Callable[..., Arguments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they differ, it is computed again; nothing of sequences that have none counts."""
    arguments = make((9, 0, 2, 4, 7), (3, 0, 6, 0, 2))
    # The third cannot be: its label has no probability, and CTC not the frames.
    if run is transducer_loss:
        arguments["bias"][4] = -torch.inf
    arguments["targets"] = torch.tensor([0, 1, 3, 4, 4, 4, 4, 4, 4, 5, 5])
    module = _cpp if run is transducer_loss else ctc_cpp
    calls: list[int] = []
    original = module._Losses.__call__

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(1)
        return original(*given, **options)

    monkeypatch.setattr(module._Losses, "__call__", counted)
    for upstream, expected in (
        ([1.0, 1.0, 1.0, 1.0, 1.0], 1),
        ([-3.0, -3.0, -3.0, -3.0, -3.0], 1),
        ([0.5, 7.0, torch.nan, 0.5, 0.5], 1),
        ([1.0, 1.0, 1.0, 2.0, -1.0], 2),
        ([0.0, 1.0, 1.0, 2.0, 0.0], 2),
    ):
        calls.clear()
        actual = gradients(run, arguments, torch.tensor(upstream), "cpp")
        assert len(calls) == expected
        finite = torch.tensor(upstream).nan_to_num(0.0)
        for name, x in gradients(run, arguments, finite, "reference").items():
            torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=1e-5, msg=name)
    with torch.no_grad():
        calls.clear()
        torch.testing.assert_close(run(**arguments, backend="cpp"), actual["loss"])
        assert len(calls) == 1


@BOTH
def test_an_infinite_loss_has_no_gradient_whatever_comes_from_above(
    run: Run, make: Callable[..., Arguments]
) -> None:
    arguments = make((3, 2, 3), (1, 2, 1))
    arguments["targets"] = torch.tensor([4, 1, 3, 4])
    arguments["bias"][1] = -torch.inf
    rows = arguments["encoded" if run is transducer_loss else "hidden"]
    for upstream in (torch.inf, torch.nan, -2.0):
        given = torch.tensor([1.0, upstream, -1.0])
        actual = gradients(run, arguments, given, "cpp")
        assert actual["loss"].isfinite().tolist() == [True, False, True]
        gradient = actual["encoded" if run is transducer_loss else "hidden"]
        assert gradient.shape == rows.shape
        assert bool((gradient[3:5] == 0).all())
        assert bool((gradient[:3] != 0).any())
        assert bool(actual["weight"].isfinite().all())


@pytest.mark.parametrize(
    "options",
    [
        {"blank_id": 0, "activation": "tanh"},
        {"blank_id": 6, "fastemit": 0.3},
        {"classes": 3, "blank_id": 1, "activation": "tanh", "fastemit": 0.1},
    ],
    ids=["first", "last", "repeats"],
)
def test_a_transducer_with_options(options: dict[str, Any]) -> None:
    arguments = transducer((5, 1, 14), (3, 0, 6), **options)
    assert_agrees(transducer_loss, arguments)
    assert_agrees(transducer_loss, arguments, torch.tensor([1.0, -2.0, 0.5]))
    arguments["targets"] = arguments["targets"].int()
    assert_agrees(transducer_loss, arguments)


@pytest.mark.parametrize("blank_id", [0, 6])
def test_ctc_with_options(blank_id: int) -> None:
    arguments = ctc((9, 4, 30), (3, 0, 6), blank_id=blank_id)
    arguments["targets"][3:6] = 3
    assert_agrees(ctc_loss, arguments)
    arguments["targets"] = arguments["targets"].int()
    assert_agrees(ctc_loss, arguments | {"bias": None}, torch.tensor([1.0, -2.0, 0.5]))


def test_gradients_are_those_of_the_value() -> None:
    """Finite differences along a direction, as far as float32 shows them."""
    for run, make in ((transducer_loss, transducer), (ctc_loss, ctc)):
        arguments = make((12, 8, 5), (4, 0, 2))
        upstream = torch.tensor([1.0, -2.0, 0.5])
        found = gradients(run, arguments, upstream, "cpp")
        for name in found.keys() - {"loss"}:
            direction = torch.randn_like(arguments[name])
            direction *= 0.02 / direction.norm()
            ends = [
                run(**(arguments | {name: arguments[name] + sign * direction}), backend="cpp")
                for sign in (1, -1)
            ]
            difference = float((ends[0] - ends[1]) @ upstream)
            expected = 2 * float((found[name] * direction).sum())
            assert abs(difference - expected) < 2e-4 + 0.01 * abs(expected), name


@pytest.mark.parametrize("size", [1, 2**12, 2**14, 2**16])
def test_agrees_however_sequences_are_divided(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the logits of each sequence made twice to all of them at once."""
    arguments = transducer((9, 4, 0, 6), (3, 5, 1, 0))
    upstream = torch.tensor([1.0, -2.0, 3.0, 0.5])
    expected = gradients(transducer_loss, arguments, upstream, "cpp")
    monkeypatch.setattr(_cpp, "_CHUNK_BYTES", size // 8)
    monkeypatch.setattr(ctc_cpp, "_GROUP_BYTES", size)
    before = set_workspace(size)
    try:
        actual = assert_agrees(transducer_loss, arguments, upstream)
        assert_agrees(ctc_loss, ctc((9, 4, 0, 6), (3, 5, 1, 0)), upstream)
    finally:
        set_workspace(before)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_long_sequences_keep_their_digits() -> None:
    """Only the steps of lattices are float32, sums along paths are not: errors do not grow."""
    for run, arguments in (
        (transducer_loss, transducer((400, 90), (120, 90), width=8)),
        (ctc_loss, ctc((1500, 400), (200, 150))),
    ):
        actual = gradients(run, arguments, torch.ones(2), "cpp")
        for name, gold in gradients(run, wide(arguments), torch.ones(2), "reference").items():
            assert (actual[name] - gold).norm() < 1e-5 * gold.norm(), name


def test_threads_change_nothing() -> None:
    arguments = transducer((40, 0, 7, 30, 12), (9, 0, 12, 5, 1))
    upstream = torch.ones(5)
    expected = gradients(transducer_loss, arguments, upstream, "cpp")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        actual = gradients(transducer_loss, arguments, upstream, "cpp")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(actual["loss"], expected["loss"])
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_take_the_place_of_inputs(dtype: torch.dtype) -> None:
    """Where that is asked for, also of a static shape's tail and of what has no gradient."""
    arguments = transducer((9, 4, 0, 2), (3, 5, 1, 0), dtype=dtype)
    arguments["bias"] = arguments["bias"].index_fill(0, arguments["targets"][3:4], -torch.inf)
    for name, rows in (("layout_frames", 17), ("layout_targets", 11)):
        lengths = arguments[name].lengths
        arguments[name] = PackedLayout.from_lengths(lengths, rows=rows, num_sequences=5)
    arguments["encoded"] = torch.randn(17, WIDTH).to(dtype)
    arguments["predicted"] = torch.randn(16, WIDTH).to(dtype)
    arguments["targets"] = torch.cat([arguments["targets"], torch.full((2,), -100)])
    upstream = torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0])
    expected = gradients(transducer_loss, arguments, upstream, "cpp")
    leaves = {name: arguments[name].requires_grad_() for name in ("encoded", "predicted")}
    copies = {name: x.clone() for name, x in leaves.items()}
    loss = transducer_loss(**(arguments | copies), backend="cpp", overwrite_inputs=True)
    assert torch.equal(loss, expected["loss"])
    found = torch.autograd.grad(loss, list(leaves.values()), upstream)
    for (name, copy), gradient in zip(copies.items(), found, strict=True):
        assert torch.equal(gradient, expected[name]), name
        assert torch.equal(copy.detach(), expected[name]), name
        assert gradient.data_ptr() == copy.data_ptr()


def test_memory_does_not_grow_with_the_batch() -> None:
    """But for gradients: one of twice as many sequences has the same peak."""
    classes, frames, labels, size = 60, 16, 3, 2**16
    peaks = []
    before = set_workspace(size)
    try:
        for sequences in (16, 32):
            arguments = transducer(
                (frames,) * sequences, (labels,) * sequences, classes=classes, width=8
            )
            leaves = [arguments[x].requires_grad_() for x in ("encoded", "predicted", "weight")]
            given = sum(x.nbytes for x in leaves)
            with Live(*(x for x in arguments.values() if isinstance(x, Tensor))) as live:
                # Past the dispatcher, which would hide what is made.
                given_arguments = TransducerArguments(**arguments, activation="relu", fastemit=0.0)
                loss = transducer_op.eager(given_arguments, "cpp")
                torch.autograd.grad(loss.sum(), leaves)
            assert 4 * sequences * frames * (labels + 1) * classes > size
            # A chunk is a sequence here, and makes its logits and joint a few times over.
            chunk = 4 * frames * (labels + 1) * (classes + 8)
            assert live.peak <= given + size + 6 * chunk
            peaks.append(live.peak - given)
    finally:
        set_workspace(before)
    assert abs(peaks[1] - peaks[0]) < 2**10, peaks


def _serving(op: TorchOp, given: Arguments) -> str:
    if op is transducer_op:
        arguments = TransducerArguments(**({"activation": "relu", "fastemit": 0.0} | given))
    else:
        arguments = CtcArguments(**given)
    return op.select(arguments).__name__.rsplit(".", 1)[1]


@BOTH
def test_is_the_first_on_a_cpu(run: Run, make: Callable[..., Arguments]) -> None:
    op = transducer_op if run is transducer_loss else ctc_op
    arguments = make((3, 2), (1, 1))
    assert _serving(op, arguments) == "_cpp"
    assert _serving(op, wide(arguments)) == "reference"
    with pytest.raises(BackendUnavailable, match="cpp: float64 is for the reference"):
        run(**wide(arguments), backend="cpp")


def test_durations_are_refused() -> None:
    arguments = transducer((4, 3), (1, 1), durations=(0, 1, 2))
    assert _serving(transducer_op, arguments) == "reference"
    with pytest.raises(BackendUnavailable, match="cpp: does not support durations"):
        transducer_loss(**arguments, backend="cpp")


@BOTH
def test_labels_out_of_range_are_named(run: Run, make: Callable[..., Arguments]) -> None:
    arguments = make((3, 2), (1, 1))
    for bad in (-1, 7, 2):
        arguments["targets"][1] = bad
        with pytest.raises(ValueError, match=rf"`targets` must hold classes in \[0, 7\).* {bad}\."):
            run(**arguments, backend="cpp")


@BOTH
def test_compiles(run: Run, make: Callable[..., Arguments]) -> None:
    arguments = make((5, 0, 2), (2, 0, 1))
    upstream = torch.tensor([1.0, 1.0, 2.0])
    expected = gradients(run, arguments, upstream, "cpp")
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for name, x in gradients(compiled, arguments, upstream, "cpp").items():
        torch.testing.assert_close(x, expected[name], msg=name)


def test_no_sequences() -> None:
    for run, make in ((transducer_loss, transducer), (ctc_loss, ctc)):
        found = gradients(run, make((), ()), torch.zeros(0), "cpp")
        assert found["loss"].shape == (0,)
        assert bool((found["weight"] == 0).all())
