"""Calls of the losses that have a backend ``cpp``, and their comparison with the references."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from effasr_kernels import PackedLayout
from effasr_kernels.testing.conformance import Case, Packed, Shared
from effasr_kernels.testing.tolerance import assert_no_worse

Arguments = dict[str, Any]
Run = Callable[..., Tensor]
WIDTH = 20


def labels_for(length: int, classes: int, blank_id: int) -> Tensor:
    labels = torch.randint(classes - 1, (length,))
    return labels + (labels >= blank_id)


def transducer(
    frames: Sequence[int],
    transcripts: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    classes: int = 7,
    width: int = WIDTH,
    blank_id: int = 2,
    **options: Any,
) -> Arguments:
    return {
        "encoded": torch.randn(sum(frames), width).to(dtype),
        "predicted": torch.randn(sum(transcripts) + len(transcripts), width).to(dtype),
        "targets": labels_for(sum(transcripts), classes, blank_id),
        "layout_frames": PackedLayout.from_lengths(frames),
        "layout_targets": PackedLayout.from_lengths(transcripts),
        "weight": torch.randn(classes, width).div(4).to(dtype),
        "bias": torch.randn(classes).to(dtype),
        "blank_id": blank_id,
    } | options


def ctc(
    frames: Sequence[int],
    transcripts: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    classes: int = 7,
    blank_id: int = 2,
) -> Arguments:
    return {
        "hidden": torch.randn(sum(frames), WIDTH).to(dtype),
        "weight": torch.randn(classes, WIDTH).div(4).to(dtype),
        "targets": labels_for(sum(transcripts), classes, blank_id),
        "layout_frames": PackedLayout.from_lengths(frames),
        "layout_targets": PackedLayout.from_lengths(transcripts),
        "bias": torch.randn(classes).to(dtype),
        "blank_id": blank_id,
    }


def case_for(run: Run, make: Callable[..., Arguments], *given: Any) -> Callable[[str], Case]:
    """The sequences of a call, to be packed in other ways."""
    arguments = make(*given)
    layouts = {name: arguments.pop(f"layout_{name}") for name in ("frames", "targets")}
    of = {"hidden": layouts["frames"], "encoded": layouts["frames"], "targets": layouts["targets"]}
    of["predicted"] = layouts["targets"].lengthened(1)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    packed, shared = {}, {}
    for name, x in tensors.items():
        x = x.double() if x.is_floating_point() else x
        if name in of:
            packed[name] = x.split(of[name].lengths)
        else:
            shared[name] = x
    rest = {name: x for name, x in arguments.items() if name not in tensors}

    def case_for(backend: str) -> Case:
        def call(packed: Packed, shared: Shared) -> Tensor:
            frames = packed["hidden" if "hidden" in packed else "encoded"]
            values = {name: x.values for name, x in packed.items()}
            layouts = {"layout_frames": frames.layout, "layout_targets": packed["targets"].layout}
            return run(**values, **shared, **layouts, **rest, backend=backend)

        one_more = frozenset({"predicted"} & packed.keys())
        return Case(call, packed, shared, one_more=one_more)

    return case_for


def gradients(run: Run, arguments: Arguments, upstream: Tensor, backend: str) -> Arguments:
    """The loss, and the gradients by all that is floating point."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    loss = run(**(arguments | leaves), backend=backend)
    found = torch.autograd.grad(loss, list(leaves.values()), upstream.to(loss))
    return {"loss": loss.detach()} | dict(zip(leaves, found, strict=True))


def wide(arguments: Arguments) -> Arguments:
    return {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }


def assert_agrees(run: Run, arguments: Arguments, upstream: Tensor | None = None) -> Arguments:
    """It errs at most twice as much as the reference does in the same dtype."""
    sequences = arguments["layout_frames"].num_sequences
    upstream = torch.ones(sequences) if upstream is None else upstream
    actual = gradients(run, arguments, upstream, "cpp")
    gold = gradients(run, wide(arguments), upstream, "reference")
    for name, baseline in gradients(run, arguments, upstream, "reference").items():
        finite = gold[name].isfinite()
        assert torch.equal(actual[name].isfinite(), finite), name
        assert_no_worse(actual[name][finite], gold[name][finite], baseline[finite])
    return actual
