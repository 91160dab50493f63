"""Decoder steps of a Transformer on CPUs, with all layers in one call of ``csrc/``.

A step of a small decoder has about 20 operations per layer, each of which takes less time than its
dispatch in torch. The result of a row depends neither on other rows nor on the number of threads.
"""

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
    """PanelMatrix of csrc/decoder_step.h."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("inputs", INT64), ("outputs", INT64)]


class _Norm(ctypes.Structure):
    """LayerNorm of csrc/decoder_step.h."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("epsilon", ctypes.c_double)]


_NORMS = "self_norm", "cross_norm", "forward_norm"
_MATRICES = "qkv", "self_out", "q", "cross_out", "first", "second"


class _Layer(ctypes.Structure):
    """DecoderLayer of csrc/decoder_step.h."""

    _fields_ = [*((name, _Norm) for name in _NORMS), *((name, _Matrix) for name in _MATRICES)]


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


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """Weights of a linear layer in panels of outputs, as the kernels read them."""

    weight: Tensor  # float32 (panels, K, 32), panels of 32 outputs; the last is padded with zeros
    bias: Tensor | None  # float32 (N,), or None
    outputs: int  # N

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None) -> "PanelMatrix":
        """Copy a weight, float32 (N, K), into panels, and the bias, float32 (N,) or None."""
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
    weight: Tensor  # float32 (width,)
    bias: Tensor  # float32 (width,)
    epsilon: float  # constant added to the variance

    def _described(self) -> _Norm:
        return _Norm(pointer(self.weight), pointer(self.bias), self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a pre-norm layer: self-attention, cross-attention, feed-forward network."""

    self_norm: Norm  # LayerNorm before self-attention
    cross_norm: Norm  # LayerNorm before cross-attention
    forward_norm: Norm  # LayerNorm before the feed-forward network
    qkv: PanelMatrix  # projection to queries, keys and values of self-attention, H D outputs each
    self_out: PanelMatrix  # output projection of self-attention
    q: PanelMatrix  # projection to queries of cross-attention, H D outputs
    cross_out: PanelMatrix  # output projection of cross-attention
    first: PanelMatrix  # first linear layer of the feed-forward network
    second: PanelMatrix  # second linear layer of the feed-forward network


@dataclass(frozen=True, slots=True)
class Cache:
    """Cache of keys and values, read and written in place."""

    # float32 (layers, 2, rows, H, room, at least D), contiguous; room is a multiple of 16. Values
    # past the end of a row must be finite.
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
    def __init__(
        self,
        *,
        layers: Sequence[Layer],  # weights of at least one layer
        tokens: Tensor,  # float32 (V, width), token embedding
        positions: Tensor,  # float32 (P, width), embedding; positions past P use the last row
        embedding_norm: Norm | None,  # LayerNorm of the sum of both embeddings, or None
        norm: Norm,  # LayerNorm after the last layer
        heads: int,  # H
        head_width: int,  # D
        activation: Literal["relu", "gelu"],  # Activation of the feed-forward networks
    ) -> None:
        """Check the weights and build their C structures."""
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
            *(
                _Layer(*(getattr(layer_weights, name)._described() for name in names))
                for layer_weights in layers
            )
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
        tokens: Tensor,  # int64 (N,), next token of each row
        positions: Tensor,  # int64 (N,), tokens decoded so far in each row; incremented in place
        active: Tensor,  # int64 (N,), 0 for rows to skip
        frames: Sequence[int],  # valid positions in ``cross_cache`` of each of the N / K sequences
        *,
        self_cache: Cache,  # cache of at least N rows, written at the positions
        cross_cache: Cache,  # cache of at least N / K rows
        hypotheses: int,  # K, number of adjacent rows that share a row of ``cross_cache``
        most_position: int,  # maximum to which positions are incremented
        instructions: int = _BEST_INSTRUCTIONS,  # as in ``csrc/interface.h``
    ) -> Tensor:
        """Decode one more token of each active row."""
        # Returns float32 (N, width), output of the last norm; zero for rows that are not active.
        count = len(tokens)
        for name, x in (("tokens", tokens), ("positions", positions), ("active", active)):
            check(_STEP, name, x, torch.int64, (count,))
        if count != len(frames) * hypotheses:
            rule = f"be of {count} rows / {hypotheses} hypotheses"
            raise wrong(_STEP, "frames", rule, f"of {len(frames)}")
        sizes = self._layers, self._heads, self._head_width
        self_keys = self_cache._described("self_cache", *sizes)
        cross_keys = cross_cache._described("cross_cache", *sizes)
        for name, cache, rows in (
            ("self_cache", self_keys, count),
            ("cross_cache", cross_keys, len(frames)),
        ):
            if cache.rows < rows:
                raise wrong(_STEP, name, f"have at least {rows} rows", cache.rows)
        out = tokens.new_empty((count, self.width), dtype=torch.float32)
        lengths = (INT64 * len(frames))(*frames)
        step = _Step(
            *(pointer(tokens), pointer(positions), pointer(active), ctypes.addressof(lengths)),
            pointer(out),
            *(self_keys, cross_keys, count, hypotheses, most_position, -1, instructions),
        )
        native.run(_STEP, "decoder_step_cpu", self._described, step)
        if step.wrong_row >= 0:
            row = step.wrong_row
            rule = (
                f"be tokens below {self._described.vocabulary}, at positions below "
                f"{self_keys.room}, of rows of at most {cross_keys.room} frames"
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
            sizes = matrix.weight.shape[1], matrix.outputs
            if sizes != (inputs, outputs):
                rule = f"map {inputs} channels to {outputs}"
                raise wrong(_STEP, f"layers[{number}].{name}", rule, f"{sizes[0]} to {sizes[1]}")

    def _check_norm(self, name: str, norm: Norm) -> None:
        for part in ("weight", "bias"):
            x: Any = getattr(norm, part)
            check(_STEP, f"{name}.{part}", x, torch.float32, (self.width,))


def largest_logit(
    hidden: Tensor,  # float32 (N, K)
    matrix: PanelMatrix,  # projection from K channels to logits
    classes: int | None = None,  # number of leading classes to choose from; all by default
    *,
    instructions: int = _BEST_INSTRUCTIONS,  # as in ``csrc/interface.h``
) -> Tensor:
    """Return the class of the largest logit of each row, int64 (N,), the first among equal ones."""
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
