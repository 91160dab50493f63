"""Benchmarks of the encoder's convolutions against cuDNN's on a padded batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, Padding, leaf
from bench.workload import Workload
from effasr_kernels import PackedLayout

_TAPS = 9


def cases(workload: Workload) -> list[Case]:
    """Return cases of a Conformer's convolution, alone and as in training, and of subsampling."""
    return [depthwise(workload), gated(workload), stem(workload), strided(workload)]


def depthwise(workload: Workload) -> Case:
    """Return a Conformer's convolution over time; padded inputs are zero in the padding."""
    layout, width = workload.frame_layout, workload.width
    x, weight = workload.rows_of(layout, width), workload.draw(width, _TAPS)
    upstream = x.detach().roll(1, 1)

    def ours(backend: str) -> Contender:
        return Contender(
            {"x": x, "weight": weight},
            lambda: kernels.depthwise_conv(x, weight, layout, backend=backend),
            [upstream],
        )

    def cudnn() -> Contender:
        padding = Padding(layout)
        rows, taps = leaf(padding.pad(x).transpose(1, 2)), leaf(weight[:, None])

        def packed(name: str, found: Tensor) -> Tensor:
            return found[:, 0] if name == "weight" else padding.pack(found.transpose(1, 2))

        return Contender(
            {"x": rows, "weight": taps},
            lambda: F.conv1d(rows, taps, padding=_TAPS // 2, groups=width),
            [padding.pad(upstream).transpose(1, 2).contiguous()],
            packed,
        )

    shape = f"{workload.describe()} C={width} K={_TAPS}"
    return Case("depthwise_conv", "", shape, ours, {"torch conv1d padded": cudnn})


def gated(workload: Workload) -> Case:
    """Return the case with the gate before it, and mean and variance for batch norm after it."""
    layout, width = workload.frame_layout, workload.width
    x, weight = workload.rows_of(layout, 2 * width), workload.draw(width, _TAPS)
    upstream = workload.rows_of(layout, width).detach()

    def ours(backend: str) -> Contender:
        return Contender(
            {"x": x, "weight": weight},
            # No gradient flows through the other two.
            lambda: kernels.depthwise_conv(
                x, weight, layout, gated=True, statistics=True, backend=backend
            )[0],
            [upstream],
        )

    def cudnn() -> Contender:
        padding = Padding(layout)
        rows, taps = leaf(padding.pad(x).transpose(1, 2)), leaf(weight[:, None])
        inside, frames = padding.mask[:, None], padding.lengths.sum()

        def call() -> Tensor:
            y = F.conv1d(F.glu(rows, 1), taps, padding=_TAPS // 2, groups=width)
            with torch.no_grad():
                counted = y.float() * inside
                mean = counted.sum((0, 2)) / frames
                counted.square().sum((0, 2)) / frames - mean.square()
            return y

        def packed(name: str, found: Tensor) -> Tensor:
            return found[:, 0] if name == "weight" else padding.pack(found.transpose(1, 2))

        grads = [padding.pad(upstream).transpose(1, 2).contiguous()]
        return Contender({"x": rows, "weight": taps}, call, grads, packed)

    shape = f"{workload.describe()} C={width} K={_TAPS}"
    return Case("depthwise_conv", "gated", shape, ours, {"torch conv1d padded": cudnn})


def _utterance_lengths(layout: PackedLayout, factor: int) -> Tensor:
    """Input rows of each utterance, a few less than its share."""
    lengths = torch.tensor(layout.lengths, device=layout.device) * factor
    return (lengths - factor // 2).clamp_min(0)


def _filters(workload: Workload) -> tuple[Tensor, Tensor]:
    """Taps (C, 9) and biases (C,), each of its own."""
    channels = workload.widths.channels
    return workload.draw(channels, 9, scale=1 / 3), workload.draw(channels)


def stem(workload: Workload) -> Case:
    """Quartering of time and frequency; features get no gradient."""
    layout, mels = workload.frame_layout, workload.widths.mels
    x = workload.rows_of(layout.scaled(8), mels).detach()
    lengths = _utterance_lengths(layout, 8)
    weight, bias = _filters(workload)
    weight_2, bias_2 = (leaf(y.flip(0)) for y in (weight, bias))
    filters = {"weight": weight, "bias": bias}
    filters |= {"depthwise_weight": weight_2, "depthwise_bias": bias_2}
    channels = workload.widths.channels
    upstream = workload.rows_of(layout.scaled(2), mels // 4, channels).detach()

    def ours(backend: str) -> Contender:
        return Contender(
            filters,
            lambda: kernels.subsampling_stem(
                x, *filters.values(), layout, lengths, backend=backend
            ),
            [upstream],
        )

    def conv2d() -> Contender:
        leaves = {
            name: leaf(y.view(-1, 1, 3, 3) if y.ndim == 2 else y) for name, y in filters.items()
        }
        first, first_bias, second, second_bias = leaves.values()
        kept = Padding(layout).kept
        counts = lengths[torch.tensor(kept, device=lengths.device)]
        wide = Padding(layout.scaled(8))
        keep = lambda rows, stride: _rows_within(rows * stride, counts)
        features = wide.pad(x)[:, None]
        features = features * _rows_within(_columns(features), counts)

        def call() -> Tensor:
            z = F.conv2d(features, first, first_bias, stride=2, padding=1).relu()
            z = z * keep(_columns(z), 2)
            y = F.conv2d(z, second, second_bias, stride=2, padding=1, groups=channels)
            return y * keep(_columns(y), 4)

        return _conv2d(leaves, call, Padding(layout.scaled(2)), upstream)

    shape = f"{workload.describe()} C={channels} F={mels}"
    return Case("subsampling_stem", "", shape, ours, {"torch conv2d padded": conv2d})


def strided(workload: Workload) -> Case:
    """Return a later halving of time and frequency."""
    layout, bands = workload.frame_layout, workload.widths.mels // 4
    channels = workload.widths.channels
    x = workload.rows_of(layout.scaled(2), bands, channels)
    lengths = _utterance_lengths(layout, 2)
    weight, bias = _filters(workload)
    upstream = workload.rows_of(layout, bands // 2, channels).detach()

    def ours(backend: str) -> Contender:
        return Contender(
            {"x": x, "weight": weight, "bias": bias},
            lambda: kernels.strided_depthwise(x, weight, bias, layout, lengths, backend=backend),
            [upstream],
        )

    def conv2d() -> Contender:
        wide = Padding(layout.scaled(2))
        counts = lengths[torch.tensor(wide.kept, device=lengths.device)]
        rows = leaf(wide.pad(x).permute(0, 3, 1, 2))
        taps, shift = leaf(weight.view(-1, 1, 3, 3)), leaf(bias)

        def call() -> Tensor:
            z = rows * _rows_within(_columns(rows), counts)
            y = F.conv2d(z, taps, shift, stride=2, padding=1, groups=channels)
            return y * _rows_within(_columns(y) * 2, counts)

        leaves = {"x": rows, "weight": taps, "bias": shift}
        return _conv2d(leaves, call, Padding(layout), upstream, wide)

    shape = f"{workload.describe()} C={channels} F={bands}"
    return Case("strided_depthwise", "", shape, ours, {"torch conv2d padded": conv2d})


def _columns(x: Tensor) -> Tensor:
    """Return the place in time of each row of (B, C, T, F): (T,)."""
    return torch.arange(x.shape[2], device=x.device)


def _rows_within(places: Tensor, counts: Tensor) -> Tensor:
    """Return which rows are inside their utterance: bool (B, 1, T, 1)."""
    return (places < counts[:, None])[:, None, :, None]


def _conv2d(
    leaves: dict[str, Tensor],
    call: Callable[[], Tensor],
    after: Padding,
    upstream: Tensor,
    before: Padding | None = None,
) -> Contender:
    """Return a contender on (B, C, T, F); taps (C, 1, 3, 3) are compared as (C, 9)."""

    def packed(name: str, found: Tensor) -> Tensor:
        if name == "x" and before is not None:
            return before.pack(found.permute(0, 2, 3, 1))
        if name == "result 0":
            return after.pack(found.permute(0, 2, 3, 1))
        return found.flatten(1) if found.ndim == 4 else found

    gradient = after.pad(upstream).permute(0, 3, 1, 2).contiguous()
    return Contender(leaves, call, [gradient], packed)
