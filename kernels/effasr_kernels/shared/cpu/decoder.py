"""Decoder steps of a Transformer on CPUs, with all layers in one call of ``csrc/``.

A step of a small decoder has about 20 operations per layer, each of which takes less time than its
dispatch in torch. The result of a row depends neither on other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.runtime import native
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.runtime.native import FLOAT, INT32, INT64, POINTER, check, pointer

_STEP, _LARGEST = "decoder_step", "largest_logit"
_PANEL = 32
_BLOCK = 16
_BEST_INSTRUCTIONS = 0


class _Matrix(ctypes.Structure):
    """PackedMatrix of csrc/decoder_step.h."""

    _fields_ = [
        ("weight", POINTER),
        ("bias", POINTER),
        ("inputs", INT64),
        ("outputs", INT64),
    ]


class _Norm(ctypes.Structure):
    """LayerNorm of csrc/decoder_step.h."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("epsilon", ctypes.c_double)]


_NORMS = "self_norm", "cross_norm", "forward_norm"
_MATRICES = "qkv", "self_out", "q", "cross_out", "first", "second"


class _Layer(ctypes.Structure):
    """DecoderLayer of csrc/decoder_step.h."""

    _fields_ = [
        *((name, _Norm) for name in _NORMS),
        *((name, _Matrix) for name in _MATRICES),
    ]


class _Weights(ctypes.Structure):
    """DecoderWeights of csrc/decoder_step.h."""

    _fields_ = [
        *((name, POINTER) for name in ("layers", "tokens", "positions")),
        *((name, _Norm) for name in ("embedding_norm", "norm")),
        *((name, INT64) for name in ("vocabulary", "most_positions")),
        *((name, INT32) for name in ("layer_count", "width", "heads", "head_width", "activation")),
        ("scale", FLOAT),
    ]


class _Cache(ctypes.Structure):
    """KeyValueCache of csrc/decoder_step.h."""

    _fields_ = [("data", POINTER), ("rows", INT64), ("room", INT64), ("width", INT64)]


class _Step(ctypes.Structure):
    """DecoderStep of csrc/decoder_step.h."""

    _fields_ = [
        *((name, POINTER) for name in ("tokens", "positions", "active", "frames", "out")),
        *((name, _Cache) for name in ("self_cache", "cross_cache")),
        *((name, INT64) for name in ("rows", "hypotheses", "most_position", "wrong_row")),
        ("instructions", INT32),
    ]


class _Largest(ctypes.Structure):
    """LargestLogit of csrc/decoder_step.h."""

    _fields_ = [
        ("hidden", POINTER),
        ("matrix", _Matrix),
        ("out", POINTER),
        ("rows", INT64),
        ("instructions", INT32),
    ]


def unsupported_reason() -> str | None:
    """Return why the library of CPU kernels cannot run on this installation, or None if it can."""
    return native.unsupported_reason()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights of a linear layer in the memory layout of the kernels.

    Attributes:
        weight: float32 (panels, K, 32), panels of 32 outputs; the last is padded with zeros.
        bias: float32 (N,), or None.
        outputs: N.
    """

    weight: Tensor
    bias: Tensor | None
    outputs: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """Pack a copy of the weight, float32 (N, K), and of the bias, float32 (N,) or None.

        Raises:
            ValueError: The dtype, the device or the size of the bias is wrong.
        """
        check(_STEP, "weight", weight, torch.float32, contiguous=False)
        outputs, inputs = weight.shape
        if bias is not None:
            check(_STEP, "bias", bias, torch.float32, (outputs,), contiguous=False)
            bias = bias.detach().clone(memory_format=torch.contiguous_format)
        panels = F.pad(weight.detach(), (0, 0, 0, -outputs % _PANEL)).view(-1, _PANEL, inputs)
        return cls(panels.transpose(1, 2).contiguous(), bias, outputs)

    def _described(self, outputs: int | None = None) -> _Matrix:
        outputs = self.outputs if outputs is None else outputs
        return _Matrix(pointer(self.weight), pointer(self.bias), self.weight.shape[1], outputs)


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of a LayerNorm.

    Attributes:
        weight: float32 (width,).
        bias: float32 (width,).
        epsilon: Constant added to the variance.
    """

    weight: Tensor
    bias: Tensor
    epsilon: float

    def _described(self) -> _Norm:
        return _Norm(pointer(self.weight), pointer(self.bias), self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a pre-norm layer: self-attention, cross-attention, feed-forward network.

    Attributes:
        self_norm: LayerNorm before self-attention.
        cross_norm: LayerNorm before cross-attention.
        forward_norm: LayerNorm before the feed-forward network.
        qkv: Projection to queries, keys and values of self-attention, H D outputs each.
        self_out: Output projection of self-attention.
        q: Projection to queries of cross-attention, H D outputs.
        cross_out: Output projection of cross-attention.
        first: First linear layer of the feed-forward network.
        second: Second linear layer of the feed-forward network.
    """

    self_norm: Norm
    cross_norm: Norm
    forward_norm: Norm
    qkv: PackedMatrix
    self_out: PackedMatrix
    q: PackedMatrix
    cross_out: PackedMatrix
    first: PackedMatrix
    second: PackedMatrix


@dataclass(frozen=True, slots=True)
class Cache:
    """Cache of keys and values, read and written in place.

    Attributes:
        values: float32 (layers, 2, rows, H, room, at least D), contiguous; room is a multiple of
            16. Values past the end of a row must be finite.
    """

    values: Tensor

    def _described(self, name: str, layers: int, heads: int, width: int) -> _Cache:
        x = self.values
        check(_STEP, name, x, torch.float32)
        shape = tuple(x.shape)
        is_right = len(shape) == 6 and shape[:2] == (layers, 2) and shape[3] == heads
        if not is_right or shape[4] % _BLOCK or shape[5] < width:
            rule = f"have shape ({layers}, 2, rows, {heads}, a multiple of 16, at least {width})"
            raise wrong(_STEP, name, rule, shape)
        return _Cache(pointer(x), shape[2], shape[4], shape[5])


class DecoderWeights:
    """Weights of a decoder.

    Attributes:
        width: Channels of the residual stream.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        tokens: Tensor,
        positions: Tensor,
        embedding_norm: Norm | None,
        norm: Norm,
        heads: int,
        head_width: int,
        activation: Literal["relu", "gelu"],
    ) -> None:
        """Check the weights and build their C structures.

        Args:
            layers: Weights of at least one layer.
            tokens: float32 (V, width), token embedding.
            positions: float32 (P, width), position embedding; positions past P use the last row.
            embedding_norm: LayerNorm of the sum of both embeddings, or None.
            norm: LayerNorm after the last layer.
            heads: H.
            head_width: D.
            activation: Activation of the feed-forward networks.

        Raises:
            ValueError: A dtype, a device or a shape is wrong.
        """
        self.width = tokens.shape[1]
        inner = heads * head_width
        for name, x in (("tokens", tokens), ("positions", positions)):
            check(_STEP, name, x, torch.float32, (len(x), self.width))
        for number, layer in enumerate(layers):
            self._check(layer, number, inner)
        self._check_norm("norm", norm)
        if embedding_norm is not None:
            self._check_norm("embedding_norm", embedding_norm)
        names = *_NORMS, *_MATRICES
        described = (_Layer * len(layers))(
            *(_Layer(*(getattr(one, name)._described() for name in names)) for one in layers)
        )
        # The structures hold raw pointers, so the tensors must live as long as they do.
        self._alive = (tuple(layers), tokens, positions, embedding_norm, norm, described)
        self._heads, self._head_width, self._layers = heads, head_width, len(layers)
        self._described = _Weights(
            ctypes.addressof(described),
            pointer(tokens),
            pointer(positions),
            _Norm() if embedding_norm is None else embedding_norm._described(),
            norm._described(),
            len(tokens),
            len(positions),
            *(len(layers), self.width, heads, head_width),
            ("relu", "gelu").index(activation),
            head_width**-0.5,
        )

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        active: Tensor,
        frames: Sequence[int],
        *,
        self_cache: Cache,
        cross_cache: Cache,
        hypotheses: int,
        most_position: int,
        instructions: int = _BEST_INSTRUCTIONS,
    ) -> Tensor:
        """Decode one more token of each active row.

        Args:
            tokens: int64 (N,), next token of each row.
            positions: int64 (N,), number of tokens decoded so far in each row; incremented in
                place.
            active: int64 (N,), 0 for rows to skip.
            frames: Number of valid positions in ``cross_cache`` of each of the N / K sequences.
            self_cache: Cache of at least N rows, written at the positions.
            cross_cache: Cache of at least N / K rows.
            hypotheses: K, number of adjacent rows that share a row of ``cross_cache``.
            most_position: Maximum to which positions are incremented.
            instructions: Instruction set as in ``csrc/attention.h``; by default the widest that the
                CPU supports.

        Returns:
            float32 (N, width), output of the last norm; zero for rows that are not active.

        Raises:
            ValueError: A dtype, a shape or a value is wrong; nothing was written.
        """
        count = len(tokens)
        for name, x in (("tokens", tokens), ("positions", positions), ("active", active)):
            check(_STEP, name, x, torch.int64, (count,))
        if count != len(frames) * hypotheses:
            rule = f"be of {count} rows / {hypotheses} hypotheses"
            raise wrong(_STEP, "frames", rule, f"of {len(frames)}")
        sizes = self._layers, self._heads, self._head_width
        own = self_cache._described("self_cache", *sizes)
        speech = cross_cache._described("cross_cache", *sizes)
        for name, cache, rows in (
            ("self_cache", own, count),
            ("cross_cache", speech, len(frames)),
        ):
            if cache.rows < rows:
                raise wrong(_STEP, name, f"have at least {rows} rows", cache.rows)
        out = tokens.new_empty((count, self.width), dtype=torch.float32)
        lengths = (INT64 * len(frames))(*frames)
        step = _Step(
            *(pointer(tokens), pointer(positions), pointer(active), ctypes.addressof(lengths)),
            pointer(out),
            *(own, speech, count, hypotheses, most_position, -1, instructions),
        )
        native.run(_STEP, "decoder_step_cpu", self._described, step)
        if step.wrong_row >= 0:
            row = step.wrong_row
            rule = (
                f"be tokens below {self._described.vocabulary}, at positions below {own.room}, of "
                f"rows of at most {speech.room} frames"
            )
            value = (
                f"{int(tokens[row])} at position {int(positions[row])} with "
                f"{frames[row // hypotheses]} frames in row {row}"
            )
            raise wrong(_STEP, "tokens", rule, value)
        return out

    def _check(self, layer: Layer, number: int, inner: int) -> None:
        for name in _NORMS:
            self._check_norm(f"layers[{number}].{name}", getattr(layer, name))
        hidden = layer.first.outputs
        for name, inputs, outputs in (
            ("qkv", self.width, 3 * inner),
            ("self_out", inner, self.width),
            ("q", self.width, inner),
            ("cross_out", inner, self.width),
            ("first", self.width, hidden),
            ("second", hidden, self.width),
        ):
            matrix = getattr(layer, name)
            found = matrix.weight.shape[1], matrix.outputs
            if found != (inputs, outputs):
                rule = f"map {inputs} channels to {outputs}"
                raise wrong(_STEP, f"layers[{number}].{name}", rule, f"{found[0]} to {found[1]}")

    def _check_norm(self, name: str, norm: Norm) -> None:
        for part in ("weight", "bias"):
            x: Any = getattr(norm, part)
            check(_STEP, f"{name}.{part}", x, torch.float32, (self.width,))


def largest_logit(
    hidden: Tensor,
    matrix: PackedMatrix,
    classes: int | None = None,
    *,
    instructions: int = _BEST_INSTRUCTIONS,
) -> Tensor:
    """Return the class of the largest logit of each row, the first among equal logits.

    Args:
        hidden: float32 (N, K).
        matrix: Projection from K channels to logits.
        classes: Number of leading classes to choose from; all by default.
        instructions: Instruction set as in ``csrc/attention.h``; by default the widest that the CPU
            supports.

    Returns:
        Classes, int64 (N,).

    Raises:
        ValueError: A dtype or a shape is wrong, or ``classes`` is not in [1, outputs].
    """
    classes = matrix.outputs if classes is None else classes
    if not 1 <= classes <= matrix.outputs:
        raise wrong(_LARGEST, "classes", f"be in 1 to {matrix.outputs}", classes)
    hidden = hidden.contiguous()
    check(_LARGEST, "hidden", hidden, torch.float32, (len(hidden), matrix.weight.shape[1]))
    out = torch.empty(len(hidden), dtype=torch.int64)
    request = _Largest(
        pointer(hidden), matrix._described(classes), pointer(out), len(hidden), instructions
    )
    native.run(_LARGEST, "largest_logit_cpu", request)
    return out
