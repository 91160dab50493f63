"""Calls of the losses over lattices, and their comparison with the references."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effasr_kernels import PackedLayout, ctc_loss, transducer_loss
from tests.support.operation_cases import labels_for
from tests.support.tolerance import assert_no_worse

Arguments = dict[str, Any]
Loss = Callable[..., Tensor]
WIDTH = 20
LEAVES = "encoded", "predicted", "weight", "bias"


def _targets(transcripts, classes, blank_id):
    """Of a number, that many random labels."""
    return [
        labels_for(y, classes, blank_id) if isinstance(y, int) else torch.tensor(y).long()
        for y in transcripts
    ]


def _call(frames, labels, device, longest, spare):
    """``spare``: rows of a tail."""
    lengths = [len(y) for y in labels]
    return {
        "targets": torch.cat([*labels, torch.full((spare,), 3)]).to(device),
        "layout_frames": PackedLayout.from_lengths(
            frames, device, rows=sum(frames) + spare, static_max_seqlen=longest and max(frames)
        ),
        "layout_targets": PackedLayout.from_lengths(
            lengths, device, rows=sum(lengths) + spare, static_max_seqlen=longest
        ),
    }


def ctc_arguments(
    frames, transcripts, device="cpu", *, dtype=torch.float32, classes=7, longest=None, **options
):
    options = {"blank_id": 2} | options
    labels = _targets(transcripts, classes, options["blank_id"])
    return {
        "hidden": torch.randn(sum(frames), WIDTH).to(device, dtype),
        "weight": torch.randn(classes, WIDTH).div(4).to(device, dtype),
        "bias": torch.randn(classes).to(device, dtype),
        **_call(frames, labels, device, longest, 0),
    } | options


def transducer_arguments(
    frames: Sequence[int],
    transcripts: Sequence[int | Sequence[int]],
    device: torch.device | str = "cpu",
    durations: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    classes: int = 7,
    width: int = WIDTH,
    longest: int | None = None,
    spare: int = 0,
    **options: Any,
) -> Arguments:
    options = {"blank_id": 2, "activation": "relu", "fastemit": 0.0} | options
    if durations is not None:
        options = {"durations": durations, "sigma": 0.05} | options
    labels = _targets(transcripts, classes, options["blank_id"])
    states, rows = sum(len(y) + 1 for y in labels), classes + len(durations or ())
    return {
        "encoded": torch.randn(sum(frames) + spare, width).to(device, dtype),
        "predicted": torch.randn(states + spare, width).to(device, dtype),
        "weight": torch.randn(rows, width).div(4).to(device, dtype),
        "bias": torch.randn(rows).to(device, dtype),
        **_call(frames, labels, device, longest, spare),
    } | options


def _floating(arguments: Arguments) -> dict[str, Tensor]:
    return {
        name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()
    }


def on_host(arguments: Arguments) -> Arguments:
    return {
        name: x.to("cpu") if isinstance(x, (Tensor, PackedLayout)) else x
        for name, x in arguments.items()
    }


def wide(arguments: Arguments) -> Arguments:
    """In float64."""
    return arguments | {name: x.double() for name, x in _floating(arguments).items()}


def loss_of(arguments: Arguments) -> Loss:
    return transducer_loss if "encoded" in arguments else ctc_loss


def gradients(arguments, upstream, backend="triton", *, loss=None, **options):
    """The loss, and the gradients by all that is floating point."""
    loss = loss_of(arguments) if loss is None else loss
    leaves = {name: x.detach().requires_grad_() for name, x in _floating(arguments).items()}
    made = {}
    if options.get("overwrite_inputs"):
        # Leaves may not be overwritten.
        made = {name: leaves[name] * 1 for name in ("encoded", "predicted")}
    values = loss(**(arguments | leaves | made), backend=backend, **options)
    result = torch.autograd.grad(values, list(leaves.values()), upstream.to(values))
    results = dict(zip(leaves, result, strict=True))
    assert all(torch.equal(x, results[name]) for name, x in made.items())
    return {"loss": values.detach()} | results


def assert_agrees(arguments, upstream=None, backend="triton"):
    """It errs at most twice as much as the reference does in the same dtype."""
    sequences = arguments["layout_frames"].num_sequences
    upstream = torch.ones(sequences) if upstream is None else upstream
    actual = gradients(arguments, upstream, backend)
    host = on_host(arguments)
    gold = gradients(wide(host), upstream, "reference")
    for name, baseline in gradients(host, upstream, "reference").items():
        actual[name] = actual[name].cpu()
        finite = gold[name].isfinite()
        assert torch.equal(actual[name].isfinite(), finite), name
        assert_no_worse(actual[name][finite], gold[name][finite], baseline[finite])
    return actual


def check_infinite_loss(make, device="cpu", backend="triton"):
    """It has no gradient, whatever comes from above."""
    arguments = make((3, 2, 3), ([4], [1, 3], [4]), device)
    # The second cannot be: one of its labels has no probability.
    arguments["bias"][1] = -torch.inf
    rows = "encoded" if "encoded" in arguments else "hidden"
    for upstream in (torch.inf, torch.nan, -2.0):
        actual = gradients(arguments, torch.tensor([1.0, upstream, -1.0]), backend)
        assert actual["loss"].isfinite().tolist() == [True, False, True]
        assert actual["loss"][1] == torch.inf
        assert not actual[rows][3:5].any()
        assert (actual[rows][:3] != 0).any()
        assert actual["weight"].isfinite().all()
    assert_agrees(arguments, backend=backend)
