"""What `ctc_loss` and `transducer_loss`, with durations and without, promise alike in Triton."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from effasr_kernels import BackendUnavailable, ctc_loss
from effasr_kernels.ctc_loss import CtcArguments, _triton
from effasr_kernels.ctc_loss import _triton as ctc
from effasr_kernels.shared import projection
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.triton import backend as transducer
from effasr_kernels.transducer_loss.triton import duration_lattice
from effasr_kernels.transducer_loss.triton import lattice as transducer_lattice
from tests.gpu.live_memory import Live
from tests.support.conformance import Variation, evaluate
from tests.support.loss_calls import (
    Arguments,
    check_infinite_loss,
    ctc_arguments,
    gradients,
    transducer_arguments,
)
from tests.support.operation_cases import FACTORIES

durations_arguments = partial(transducer_arguments, durations=(0, 1, 2))
Make = Callable[..., dict[str, Any]]
LOSSES = {"ctc": ctc_arguments, "rnnt": transducer_arguments, "tdt": durations_arguments}
each = pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
bounds = pytest.mark.parametrize("longest", [None, 9])


def _forward(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Results, and what is saved, which is like what was announced."""
    is_ctc = "hidden" in arguments
    module, kind = (ctc, CtcArguments) if is_ctc else (transducer, TransducerArguments)
    (loss, *_), saved = module.forward(kind(**arguments))  # type: ignore[arg-type]
    announced = module.saved_like(kind(**arguments))  # type: ignore[arg-type]
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in announced]
    return loss, saved


@each
def test_an_infinite_loss_has_no_gradient(make: Make, device: torch.device) -> None:
    check_infinite_loss(make, device)


@each
@bounds
def test_a_sequence_without_gradient_may_hold_nan(
    make: Make, longest: int | None, device: torch.device
) -> None:
    arguments = make((3, 4), ([1], [1, 3]), device, longest=longest)
    upstream = torch.tensor([1.0, 0.0])
    clean = gradients(arguments, upstream)
    for name, first in {"hidden": 3, "encoded": 3, "predicted": 2}.items():
        if name in arguments:
            arguments[name][first:] = torch.nan
    actual = gradients(arguments, upstream)
    assert bool(actual.pop("loss")[1].isnan())
    for name, x in actual.items():
        assert torch.equal(x, clean[name]), name


@each
@bounds
def test_labels_out_of_range_give_nan_and_reach_no_other_sequence(
    make: Make, longest: int | None, device: torch.device
) -> None:
    """The definition refuses them, on a CPU; a kernel cannot look without waiting."""
    arguments = make((3, 4, 3), ([1], [1, 3], [4]), device, longest=longest)
    clean, saved = _forward(arguments)
    if "encoded" in arguments:
        # Logits are kept where the layout has a bound.
        assert (saved[0].numel() > 0) == (longest is not None)
    for label in (-1, 11, 2**20):
        arguments["targets"][1] = label
        loss, _ = _forward(arguments)
        assert loss.isnan().tolist() == [False, True, False]
        assert torch.equal(loss[::2], clean[::2])


@each
def test_loads_ahead_of_stores_to_their_buffer_change_no_bit(
    make: Make, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares overwrite the scores of a frame while those of later frames are fetched."""
    arguments = make((40, 3, 21), ([1, 1, 3, 1] * 4, [1, 3], [0, 4]), device)
    upstream = torch.tensor([1.0, -2.0, 0.5])
    ahead = gradients(arguments, upstream)
    sweep, make_sweeps = ctc._sweep, duration_lattice.DurationSweeps.__init__

    def changed(self: Any, *call: Any) -> None:
        make_sweeps(self, *call)
        assert self._options["STAGES"] > 1
        self._options |= {"STAGES": 1}

    assert sweep(20)["STAGES"] > 1
    monkeypatch.setattr(ctc, "_sweep", lambda columns: sweep(columns) | {"STAGES": 1})
    monkeypatch.setattr(duration_lattice.DurationSweeps, "__init__", changed)
    strip = transducer_lattice._strip
    monkeypatch.setattr(transducer_lattice, "_strip", lambda bound: strip(bound) | {"STAGES": 1})
    for name, x in gradients(arguments, upstream).items():
        assert torch.equal(x, ahead[name]), name


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    arguments = ctc_arguments((3,), ([1],), device, longest=2048)
    with pytest.raises(BackendUnavailable, match="up to 2047 labels in a sequence, not 2048"):
        ctc_loss(**arguments, backend="triton")
    for last, reason in ((8, None), (9, "durations of up to 8 frames")):
        arguments = transducer_arguments((3,), ([1],), device, (0, 1, last))
        found = transducer.unsupported_reason(TransducerArguments(**arguments))
        assert found is None if reason is None else reason in str(found)
    with pytest.raises(ValueError, match="`size` must be positive, but is 0"):
        set_workspace(0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["ctc_loss", "linear_cross_entropy"])
def test_no_tensor_holds_all_logits(
    name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Nothing is larger than the logits of one chunk, or than an argument of whole blocks."""
    monkeypatch.setattr(projection, "chunk_rows", lambda width: 16)
    monkeypatch.setattr(projection, "_PROGRAMS", 1)
    case = FACTORIES[name]((40, 56), width=8, classes=144)("triton")
    with Live() as live:
        evaluate(case, Variation(dtype=torch.float32, device=device))
    assert 4 * 144 * 8 <= live.largest <= 4 * max(16 * 144, 96 * 16)


def _arguments(
    frames: Sequence[int], transcripts: Any, device: torch.device, classes: int = 6, **options: Any
) -> Arguments:
    return ctc_arguments(frames, transcripts, device, classes=classes, bias=None, **options)


def test_classes_of_no_probability(device: torch.device) -> None:
    """A bias of -inf masks a class: the transcripts that need it are impossible."""
    arguments = _arguments((3, 2, 5), ([1], [1, 3], [4, 0, 4]), device)
    arguments["bias"] = torch.tensor([0.0, 0, -torch.inf, 0, 0, -torch.inf], device=device)
    upstream = torch.tensor([1.0, 0.5, -1.0])
    actual = gradients(arguments, upstream)
    assert actual["loss"].isfinite().tolist() == [True] * 3
    arguments["bias"][1] = -torch.inf
    actual = gradients(arguments, upstream)
    assert actual["loss"].tolist()[:2] == [torch.inf] * 2
    assert bool((actual["hidden"][:5] == 0).all())
    assert bool((actual["hidden"][5:] != 0).any())
    assert bool(actual["weight"].isfinite().all())


def test_a_label_that_is_the_blank_is_not_written_twice(device: torch.device) -> None:
    """It is wrong, but must not make two threads race for one element."""
    arguments = _arguments((5,), ([1, 2, 1],), device)
    layouts = arguments["layout_frames"], arguments["layout_targets"]
    (loss,), saved = _triton.forward(CtcArguments(**arguments))
    _, classes, _ = _triton.occupancies_of(
        torch.ones_like(loss), loss, saved[1:], arguments["targets"], *layouts, 2
    )
    assert classes.tolist() == [1, -1, -1]
