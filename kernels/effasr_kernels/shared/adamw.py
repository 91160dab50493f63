"""AdamW over all tensors of a model in one launch: clipping, update, average and narrow copy.

The norm of all gradients is a launch before, and needs no list of tensors on the host.

Of an element it reads gradient, weight and two moments and writes the last three: 28 bytes in
float32. An average of the weights adds 8 bytes, and a copy in 16 bits 2. Clipping adds none.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.runtime.launch import refusal as refusal

_BLOCK = 512
"""Elements of a step: 4 for each thread, a load of 16 bytes of each tensor."""

_CHUNK = 16_384
"""Elements of a program: with 30 bytes each, the 64 bytes of its addresses do not count."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Tensors:
    """What belongs to a weight: contiguous tensors of its shape, float32 but for the copy."""

    weight: Tensor
    first: Tensor  # moments
    second: Tensor
    average: Tensor | None
    copy: Tensor | None  # bfloat16 or float16


class Table:
    """The addresses of all tensors, on their device."""

    def __init__(self, tensors: Sequence[Tensors], decays: Sequence[float]) -> None:
        """``decays``: the weight decay of each."""
        self.tensors, device = tensors, tensors[0].weight.device
        sizes = [x.weight.numel() for x in tensors]
        rows = [
            [_address(y) for y in (x.weight, x.first, x.second, x.average, x.copy)] + [size]
            for x, size in zip(tensors, sizes, strict=True)
        ]
        chunks = [(n, c) for n, size in enumerate(sizes) for c in range(ceil_div(size, _CHUNK))]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._chunks = torch.tensor(chunks, dtype=torch.int32, device=device).view(-1, 2)
        self._decays = torch.tensor(decays, dtype=torch.float32, device=device)
        self._gradients = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        self._addresses = [0] * len(tensors)
        self._copy = next((x.copy.dtype for x in tensors if x.copy is not None), torch.bfloat16)

    def update(
        self,
        gradients: Sequence[Tensor | None],  # contiguous float32; None: no update of this weight
        steps: Tensor,  # float32 (P,), updates made of each; increased
        corrections: Tensor,  # float64 (P, 2), beta ** (updates + 1) - 1 of both moments
        rates: Tensor,  # float32 (2,): learning rate, and share of the weights in the average
        infinite: Tensor,  # float32 (); with 1 only averages change
        norm: Tensor | None,  # float32 (), of all gradients; None: they are not clipped
        *,
        clip: float,  # largest norm
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._point_to(gradients)
        of_weights = [
            y
            for x in self.tensors
            for y in (x.weight, x.first, x.second, x.average)
            if y is not None
        ]
        copies = [x.copy for x in self.tensors if x.copy is not None]
        launch(
            adamw_chunk,
            (len(self._chunks),),
            *(self._rows, self._gradients, self._chunks, self._decays),
            *(steps, corrections, rates, infinite, norm),
            *(clip, betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps),
            read=[*(x for x in gradients if x is not None), *of_weights],
            written=[*of_weights, *copies],
            num_stages=1,
            COPY=_NAMES[self._copy],
            BLOCK=_BLOCK,
            CHUNK=_CHUNK,
        )

    def norm(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of all gradients, float32 (), added in a fixed order."""
        self._point_to(gradients)
        squares = torch.empty(len(self._chunks), device=self._chunks.device)
        launch(
            adamw_squares,
            (len(self._chunks),),
            *(self._rows, self._gradients, self._chunks, squares),
            read=[x for x in gradients if x is not None],
            num_stages=1,
            BLOCK=_BLOCK,
            CHUNK=_CHUNK,
        )
        return squares.sum().sqrt()

    def _point_to(self, gradients: Sequence[Tensor | None]) -> None:
        addresses = [_address(x) for x in gradients]
        if addresses != self._addresses:
            self._addresses = addresses
            host = torch.tensor(addresses, dtype=torch.int64)
            if self._gradients.device.type == "cuda":
                host = host.pin_memory()
            self._gradients.copy_(host, non_blocking=True)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


_SETTINGS = ["clip", "beta1", "new1", "beta2", "new2", "eps"]


@triton.jit(do_not_specialize=_SETTINGS)
def adamw_chunk(
    rows,  # int64 (P, 6): addresses of weight, moments, average and copy, 0 for none; elements
    gradients,  # int64 (P,), addresses
    chunks,  # int32 (programs, 2): number of the tensor, and of its chunk
    decays,  # (P,)
    steps,  # (P,), written
    corrections,  # float64 (P, 2)
    rates,  # (2,)
    infinite,  # ()
    norm,  # () or None
    clip,
    beta1,
    new1,  # 1 - beta1, which float32 would round
    beta2,
    new2,
    eps,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update a chunk of a weight."""
    number = tl.load(chunks + 2 * tl.program_id(0))
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1)
    row = rows + 6 * number
    weight, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    average, copy, elements = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    gradient = tl.load(gradients + number)
    is_updated = (gradient != 0) & (tl.load(infinite) == 0)
    factor = 1.0
    if norm is not None:
        factor = tl.minimum(tl.div_rn(clip, tl.load(norm) + 1e-6), 1.0)
    lr = tl.load(rates)
    size = tl.div_rn(lr, -tl.load(corrections + 2 * number).to(tl.float32))
    root = tl.sqrt_rn(-tl.load(corrections + 2 * number + 1).to(tl.float32))
    keep = 1 - lr * tl.load(decays + number)
    if is_updated & (chunk == 0):
        made = tl.load(steps + number)
        # All warps load it, and one of them stores.
        tl.debug_barrier()
        tl.store(steps + number, made + 1)
    begin = chunk.to(tl.int64) * CHUNK
    addresses = weight | first | second | average | gradient | (copy * 2)
    is_aligned = ((addresses | (elements * 4)) & 15) == 0
    if is_aligned:
        _update(
            weight, first, second, average, copy, gradient, begin, elements, is_updated, factor,
            size, root, keep, tl.load(rates + 1), beta1, new1, beta2, new2, eps,
            COPY, BLOCK, CHUNK, 16,
        )  # fmt: skip
    else:
        _update(
            weight, first, second, average, copy, gradient, begin, elements, is_updated, factor,
            size, root, keep, tl.load(rates + 1), beta1, new1, beta2, new2, eps,
            COPY, BLOCK, CHUNK, 4,
        )  # fmt: skip


@triton.jit
def _update(
    weight,
    first,
    second,
    average,
    copy,
    gradient,
    begin,
    elements,
    is_updated,
    factor,
    size,
    root,
    keep,
    share,
    beta1,
    new1,
    beta2,
    new2,
    eps,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Update ``elements`` of a weight at most, from ``begin``, whose addresses are aligned."""
    weights = _pointer(weight, tl.float32, ALIGNMENT)
    firsts = _pointer(first, tl.float32, ALIGNMENT)
    seconds = _pointer(second, tl.float32, ALIGNMENT)
    # Tells the compiler what divides it; `tl.multiple_of` would hold for both calls.
    elements = elements // (ALIGNMENT // 4) * (ALIGNMENT // 4)
    for start in range(0, CHUNK, BLOCK):
        i = begin + start + tl.arange(0, BLOCK)
        mask = i < elements
        w = tl.load(weights + i, mask=mask)
        if is_updated:
            g = tl.load(_pointer(gradient, tl.float32, ALIGNMENT) + i, mask=mask) * factor
            m = tl.load(firsts + i, mask=mask)
            v = tl.load(seconds + i, mask=mask)
            m += new1 * (g - m)
            v = beta2 * v + new2 * (g * g)
            w = w * keep - tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
            tl.store(weights + i, w, mask=mask)
            tl.store(firsts + i, m, mask=mask)
            tl.store(seconds + i, v, mask=mask)
            if copy != 0:
                kind: tl.constexpr = tl.bfloat16 if COPY == "bf16" else tl.float16
                copies = _pointer(copy, kind, ALIGNMENT // 2)
                tl.store(copies + i, w.to(kind), mask=mask)
        if average != 0:
            averages = _pointer(average, tl.float32, ALIGNMENT)
            mean = tl.load(averages + i, mask=mask)
            tl.store(averages + i, mean + share * (w - mean), mask=mask)


@triton.jit
def adamw_squares(rows, gradients, chunks, squares, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write the sum of the squares of a chunk of a gradient; arguments as in `adamw_chunk`."""
    number = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    elements, gradient = tl.load(rows + 6 * number + 5), tl.load(gradients + number)
    elements = tl.where(gradient == 0, 0, elements)
    if ((gradient | (elements * 4)) & 15) == 0:
        total = _squares(gradient, begin, elements, BLOCK, CHUNK, 16)
    else:
        total = _squares(gradient, begin, elements, BLOCK, CHUNK, 4)
    tl.store(squares + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _squares(
    gradient, begin, elements, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr
):
    values = _pointer(gradient, tl.float32, ALIGNMENT)
    elements = elements // (ALIGNMENT // 4) * (ALIGNMENT // 4)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        i = begin + start + tl.arange(0, BLOCK)
        g = tl.load(values + i, mask=i < elements, other=0.0)
        total += g * g
    return total


@triton.jit
def _pointer(address, KIND: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(KIND)), ALIGNMENT)
