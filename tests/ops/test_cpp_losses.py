"""The backend ``cpp`` of the losses over lattices, through the public functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import BackendUnavailable, PackedLayout, transducer_loss
from effasr_kernels.ctc_loss import OPERATION as CTC
from effasr_kernels.ctc_loss import CtcArguments
from effasr_kernels.ctc_loss import _cpp as ctc_cpp
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss import OPERATION as TRANSDUCER
from effasr_kernels.transducer_loss import TransducerArguments, _cpp, set_workspace
from effasr_kernels.transducer_loss.lattice import occupancies
from tests.gpu.live_memory import Live
from tests.support.conformance import check_kernel
from tests.support.loss_calls import (
    Arguments,
    assert_agrees,
    check_infinite_loss,
    ctc_arguments,
    gradients,
    loss_of,
    transducer_arguments,
    wide,
)
from tests.support.operation_cases import FACTORIES
from tests.support.tolerance import AWKWARD_LENGTHS

pytestmark = pytest.mark.usefixtures("cpp_library")
NARROW = torch.bfloat16, torch.float16
Make = Callable[..., Arguments]
both = pytest.mark.parametrize("make", [transducer_arguments, ctc_arguments])
each = pytest.mark.parametrize("name", ["transducer_loss", "ctc_loss", "best_alignment_loss"])


@each
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        *((lengths, torch.float32) for lengths in (*AWKWARD_LENGTHS.values(), (9, 0, 30))),
        *(((9, 0, 30), dtype) for dtype in NARROW),
    ],
    ids=str,
)
def test_contract(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    check_kernel(FACTORIES[name](lengths), dtype, backend="cpp")


def test_the_joint_is_rounded_as_a_layer_would() -> None:
    for dtype in NARROW:
        arguments = transducer_arguments((9, 0, 30), (3, 0, 4), dtype=dtype)
        losses = [transducer_loss(**arguments, backend=x) for x in ("cpp", "reference")]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)


@both
def test_one_upstream_gradient_scales_what_the_forward_left(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they differ, it is computed again; nothing of sequences that have none counts."""
    arguments = make((9, 0, 2, 4, 7), (3, 0, 6, 0, 2))
    # The third cannot be: its label has no probability, and CTC not the frames.
    arguments["bias"][4] = -torch.inf
    arguments["targets"] = torch.tensor([0, 1, 3, 4, 4, 4, 4, 4, 4, 5, 5])
    module = _cpp if make is transducer_arguments else ctc_cpp
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
        actual = gradients(arguments, torch.tensor(upstream), "cpp")
        assert len(calls) == expected
        finite = torch.tensor(upstream).nan_to_num(0.0)
        for name, x in gradients(arguments, finite, "reference").items():
            torch.testing.assert_close(actual[name], x, rtol=1e-5, atol=1e-5, msg=name)
    with torch.no_grad():
        calls.clear()
        losses = loss_of(arguments)(**arguments, backend="cpp")
        torch.testing.assert_close(losses, actual["loss"])
        assert len(calls) == 1


@both
def test_an_infinite_loss_has_no_gradient(make: Make) -> None:
    check_infinite_loss(make, backend="cpp")


def test_threads_share_no_workspace() -> None:
    """Of many sequences of other lengths each, threads compute several at a time."""
    frames = torch.tensor([0, *(7 * n % 40 for n in range(3000))]).cumsum(0).int()
    labels = torch.tensor([0, *(5 * n % 12 for n in range(3000))]).cumsum(0).int()
    scores = -torch.rand(int(frames[-1]), 12)
    targets = torch.arange(int(labels[-1])) % 5
    found = []
    try:
        for threads in (1, *[4] * 5):
            torch.set_num_threads(threads)
            occupancies = torch.zeros_like(scores)
            lattice.ctc(scores, None, targets, frames, labels, occupancies)
            found.append(occupancies)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(found[0], x) for x in found)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (transducer_arguments, {"blank_id": 0, "activation": "tanh"}),
        (transducer_arguments, {"blank_id": 6, "fastemit": 0.3}),
        (
            transducer_arguments,
            {"classes": 3, "blank_id": 1, "fastemit": 0.1},
        ),
        (ctc_arguments, {"blank_id": 0}),
        (ctc_arguments, {"classes": 3, "blank_id": 1}),
        (ctc_arguments, {"blank_id": 6, "bias": None}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options(make: Make, options: dict[str, Any]) -> None:
    arguments = make((5, 4, 30), (3, 0, 6), **options)
    assert_agrees(arguments, backend="cpp")
    arguments["targets"] = arguments["targets"].int()
    assert_agrees(arguments, torch.tensor([1.0, -2.0, 0.5]), "cpp")


SHAPES = (
    *((1, 0), (1, 1), (2, 1), (2, 2), (6, 4), (9, 4), (60, 20), (40, 0), (0, 0), (0, 2), (1, 2)),
    *((130, 31), (130, 32), (130, 33), (150, 99), (1, 40), (3, 40), (70, 66), (3, 100), (33, 64)),
)


@both
def test_every_size_of_a_lattice(make: Make) -> None:
    """Vectors are filled or not; the losses are the same to the bit on several threads."""
    frames, labels = zip(*SHAPES, strict=True)
    arguments, upstream = make(frames, labels, classes=9), torch.randn(len(SHAPES))
    expected = assert_agrees(arguments, upstream, "cpp")
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        try:
            actual = gradients(arguments, upstream, "cpp")
        finally:
            torch.set_num_threads(1)
        assert torch.equal(actual.pop("loss"), expected["loss"])
        for name, x in actual.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("size", [1, 2**12, 2**14, 2**16])
def test_agrees_however_sequences_are_divided(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the logits of each sequence made twice to all of them at once."""
    arguments = transducer_arguments((9, 4, 0, 6), (3, 5, 1, 0))
    upstream = torch.tensor([1.0, -2.0, 3.0, 0.5])
    expected = gradients(arguments, upstream, "cpp")
    monkeypatch.setattr(_cpp, "_CHUNK_BYTES", size // 8)
    monkeypatch.setattr(ctc_cpp, "_GROUP_BYTES", size)
    before = set_workspace(size)
    try:
        actual = assert_agrees(arguments, upstream, "cpp")
        assert_agrees(ctc_arguments((9, 4, 0, 6), (3, 5, 1, 0)), upstream, "cpp")
    finally:
        set_workspace(before)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: transducer_arguments((400, 90), (120, 90), width=8),
        lambda: ctc_arguments((1500, 400), (200, 150)),
    ],
    ids=["transducer", "ctc"],
)
def test_long_sequences_keep_their_digits(arguments: Callable[[], Arguments]) -> None:
    """Only the steps of lattices are float32, sums along paths are not: errors do not grow."""
    made = arguments()
    actual = gradients(made, torch.ones(2), "cpp")
    for name, gold in gradients(wide(made), torch.ones(2), "reference").items():
        assert (actual[name] - gold).norm() < 1e-5 * gold.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_gradients_take_the_place_of_inputs(dtype: torch.dtype) -> None:
    """Where that is asked for, also of a static shape's tail and of what has no gradient."""
    arguments = transducer_arguments((9, 4, 0, 2), (3, 5, 1, 0), dtype=dtype, spare=2)
    impossible = arguments["targets"][3:4]
    arguments["bias"] = arguments["bias"].index_fill(0, impossible, -torch.inf)
    for name in ("layout_frames", "layout_targets"):
        given = arguments[name]
        arguments[name] = PackedLayout.from_lengths(given.lengths, rows=given.rows, num_sequences=5)
    arguments["predicted"] = torch.cat([arguments["predicted"], arguments["predicted"][:1]])
    upstream = torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0])
    expected = gradients(arguments, upstream, "cpp")
    actual = gradients(arguments, upstream, "cpp", overwrite_inputs=True)
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


def test_memory_does_not_grow_with_the_batch() -> None:
    """But for gradients: one of twice as many sequences has the same peak."""
    classes, frames, labels, size = 60, 16, 3, 2**16
    peaks = []
    before = set_workspace(size)
    try:
        for sequences in (16, 32):
            lengths = (frames,) * sequences, (labels,) * sequences
            arguments = transducer_arguments(*lengths, classes=classes, width=8)
            leaves = [arguments[x].requires_grad_() for x in ("encoded", "predicted", "weight")]
            given = sum(x.nbytes for x in leaves)
            with Live(*(x for x in arguments.values() if isinstance(x, Tensor))) as live:
                # Past the dispatcher, which would hide what is made.
                loss = TRANSDUCER.eager(TransducerArguments(**arguments), "cpp")
                torch.autograd.grad(loss.sum(), leaves)
            assert 4 * sequences * frames * (labels + 1) * classes > size
            # A chunk is a sequence here, and makes its logits and joint a few times over.
            chunk = 4 * frames * (labels + 1) * (classes + 8)
            assert live.peak <= given + size + 6 * chunk
            peaks.append(live.peak - given)
    finally:
        set_workspace(before)
    assert abs(peaks[1] - peaks[0]) < 2**10, peaks


@both
def test_is_the_first_on_a_cpu(make: Make) -> None:
    is_ctc, arguments = make is ctc_arguments, make((3, 2), (1, 1))
    op, kind = (CTC, CtcArguments) if is_ctc else (TRANSDUCER, TransducerArguments)
    serving = lambda given: op.select(kind(**given)).__name__.rsplit(".", 1)[1]
    assert serving(arguments) == "_cpp"
    assert serving(wide(arguments)) == "reference"
    with pytest.raises(BackendUnavailable, match="cpp: float64 is for the reference"):
        loss_of(arguments)(**wide(arguments), backend="cpp")


def test_durations_are_refused() -> None:
    arguments = transducer_arguments((4, 3), (1, 1), durations=(0, 1, 2))
    with pytest.raises(BackendUnavailable, match="cpp: does not support durations"):
        transducer_loss(**arguments, backend="cpp")
    implementation = TRANSDUCER.select(TransducerArguments(**arguments))
    assert implementation.__name__.endswith("reference")


@both
def test_compiles(make: Make) -> None:
    arguments = make((5, 0, 2), (2, 0, 1))
    upstream = torch.tensor([1.0, 1.0, 2.0])
    expected = gradients(arguments, upstream, "cpp")
    torch._dynamo.reset()
    compiled = torch.compile(loss_of(arguments), fullgraph=True, backend="aot_eager")
    for name, x in gradients(arguments, upstream, "cpp", loss=compiled).items():
        torch.testing.assert_close(x, expected[name], msg=name)


def test_a_long_transcript_makes_groups_of_ctc_smaller() -> None:
    """The others of its group are padded to it, so that it counts for every frame."""

    def divide(labels: list[int]) -> tuple[int, int]:
        """The number of groups, and the most padded labels of one."""
        frames = PackedLayout.from_lengths([400] * len(labels))
        losses = ctc_cpp._Losses(frames, PackedLayout.from_lengths(labels), torch.zeros(0), 0)
        groups = list(losses.groups(32))
        assert [begin for begin, _ in groups] == [0, *(end for _, end in groups[:-1])]
        assert groups[-1][1] == len(labels)
        return len(groups), max((e - b) * 400 * (max(labels[b:e]) + 1) for b, e in groups)

    even, uneven = divide([60] * 250), divide([380] + [60] * 249)
    assert even[0] <= uneven[0]
    assert uneven[1] <= 64 * 2**20 / (4 * 8)
    assert divide([0]) == (1, 400)


def _offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def test_masses_far_apart_lose_nothing() -> None:
    """The path that counts may lie thousands below the largest mass of its diagonal."""
    # Log-probabilities like those of an untrained model; NaN where they must not be read.
    blank, label = torch.randn(2, 40, 21) - torch.tensor(1.65 * 1024).log()
    label[:, :-1] -= 300.0
    label[:, -1] = torch.nan
    blank[-1, :-1] = -torch.inf
    arguments = blank.flatten(), label.flatten(), _offsets(40), _offsets(20)
    first, found = torch.zeros(1, dtype=torch.int64), torch.empty(2, 40 * 21)
    total = lattice.transducer(*arguments, first, (found[0], found[1]))
    assert torch.equal(lattice.transducer(*arguments, first), total)
    expected, *nodes = occupancies(blank, label[:, :-1])
    torch.testing.assert_close(total[0] - expected, 0 * expected, rtol=0, atol=3e-6)
    for x, y in zip(found, nodes, strict=True):
        torch.testing.assert_close(x.view(40, 21).double(), y.double(), rtol=5e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_blank": torch.zeros(6).double()}, "`log_blank` must be float32"),
        ({"log_label": torch.zeros(5)}, "`log_label` must have shape"),
        ({"cu_frames": _offsets(3).long()}, "`cu_frames` must be int32"),
        ({"first_nodes": torch.zeros(2, dtype=torch.int64)}, "`first_nodes` must have shape"),
        ({"log_blank": torch.zeros(12)[::2]}, "must be contiguous"),
        ({}, "`first_nodes` must have ranges within the 6 elements"),
        ({"log_blank": torch.zeros(6, device="meta")}, "`log_blank` must be on a CPU"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x,
)
def test_error_messages(changed: dict[str, Tensor], message: str) -> None:
    arguments = {
        **{name: torch.zeros(6) for name in ("log_blank", "log_label")},
        **{name: _offsets(3) for name in ("cu_frames", "cu_labels")},
        "first_nodes": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        lattice.transducer(**(arguments | changed))
