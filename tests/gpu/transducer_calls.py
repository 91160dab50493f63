"""Calls of `transducer_loss` on a GPU, without and with durations, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from effasr_kernels import PackedLayout, transducer_loss
from effasr_kernels.testing.conformance import Case, Packed, Shared
from effasr_kernels.testing.tolerance import assert_no_worse

WIDTH, ROOMY = 20, 2**29
LEAVES = "encoded", "predicted", "weight", "bias"


def labels_for(length: int, classes: int = 7, blank_id: int = 2) -> Tensor:
    labels = torch.randint(classes - 1, (length,))
    return labels + (labels >= blank_id)


def case_for(
    frames: Sequence[int],
    transcripts: Sequence[int] | None = None,
    durations: tuple[int, ...] | None = None,
    *,
    classes: int = 7,
    dtype: torch.dtype = torch.int64,
    longest: int | None = None,
    **options: Any,
) -> Callable[[str], Case]:
    """A transcript of a third of each length, but for the last, which is longer than its frames."""
    settings: dict[str, Any] = {"blank_id": 2, "activation": "relu", "durations": durations}
    settings |= options
    if transcripts is None:
        transcripts = [(n + 2) // 3 for n in frames]
        transcripts[-1] = frames[-1] + 1 if 0 < frames[-1] < 8 else transcripts[-1]
    labels = [labels_for(n, classes, settings["blank_id"]) for n in transcripts]
    rows = classes + len(durations or ())
    packed = {
        "encoded": [torch.randn(n, WIDTH, dtype=torch.float64) for n in frames],
        "predicted": [torch.randn(len(y) + 1, WIDTH, dtype=torch.float64) for y in labels],
        "targets": [x.to(dtype) for x in labels],
    }
    shared = {
        "weight": torch.randn(rows, WIDTH, dtype=torch.float64) / 4,
        "bias": torch.randn(rows, dtype=torch.float64),
    }

    def make(backend: str) -> Case:
        def run(packed: Packed, shared: Shared) -> Tensor:
            encoded, targets = packed["encoded"], packed["targets"]
            layout = targets.layout
            layout = PackedLayout(layout.cu_seqlens, layout.cu_seqlens_host, layout.rows, longest)
            return transducer_loss(
                *(encoded.values, packed["predicted"].values, targets.values),
                *(encoded.layout, layout, shared["weight"], shared["bias"]),
                backend=backend,
                **settings,
            )

        return Case(run, packed, shared, one_more=frozenset({"predicted"}))

    return make


def arguments_for(
    frames: Sequence[int],
    transcripts: Sequence[Sequence[int]],
    device: torch.device,
    durations: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    classes: int | None = None,
    width: int = WIDTH,
    longest: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    states = sum(map(len, transcripts)) + len(transcripts)
    if durations is not None:
        options = {"durations": durations, "sigma": 0.05} | options
    classes = (6 if durations is None else 7) if classes is None else classes
    rows = classes + len(durations or ())
    return {
        "encoded": torch.randn(sum(frames), width).to(device, dtype),
        "predicted": torch.randn(states, width).to(device, dtype),
        "targets": torch.tensor([*chain(*transcripts)], dtype=torch.int64).to(device),
        "layout_frames": PackedLayout.from_lengths(frames, device),
        "layout_targets": PackedLayout.from_lengths(
            [len(x) for x in transcripts], device, static_max_seqlen=longest
        ),
        "weight": torch.randn(rows, width).div(4).to(device, dtype),
        "bias": torch.randn(rows).to(device, dtype),
        "blank_id": 2,
        "activation": "relu",
        "fastemit": 0.0,
    } | options


def gradients(
    arguments: dict[str, Any], upstream: Tensor, backend: str, **options: Any
) -> dict[str, Tensor]:
    """The loss, and the gradients by all that is floating point."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    loss = transducer_loss(**(arguments | leaves | made), backend=backend, **options)
    found = torch.autograd.grad(loss, list(leaves.values()), upstream.to(loss))
    return {"loss": loss.detach()} | dict(zip(leaves, found, strict=True))


def assert_agrees(arguments: dict[str, Any], upstream: Tensor | None = None) -> dict[str, Tensor]:
    sequences = arguments["layout_frames"].num_sequences
    upstream = torch.ones(sequences) if upstream is None else upstream
    host = {
        name: x.cpu() if isinstance(x, Tensor) else x.to("cpu") if "layout" in name else x
        for name, x in arguments.items()
    }
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in host.items()
    }
    actual = {name: x.cpu() for name, x in gradients(arguments, upstream, "triton").items()}
    gold = gradients(wide, upstream, "reference")
    for name, baseline in gradients(host, upstream, "reference").items():
        finite = gold[name].isfinite()
        assert torch.equal(actual[name].isfinite(), finite), name
        assert_no_worse(actual[name][finite], gold[name][finite], baseline[finite])
    return actual
