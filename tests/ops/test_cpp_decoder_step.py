"""A decoder's step on CPUs (csrc/decoder_step_cpu.cpp), against sums in float64."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.shared.cpu import decoder as cpu_decoder
from effasr_kernels.shared.cpu.decoder import Cache, DecoderWeights, Layer, Norm, PanelMatrix

pytestmark = pytest.mark.usefixtures("cpp_library")
LAYERS, VOCABULARY, POSITIONS, ROOM, FRAMES = 2, 19, 9, 32, 48
NORMS = ("self_norm", "cross_norm", "forward_norm")


@dataclass(frozen=True)
class Sizes:
    """Of a decoder."""

    width: int
    heads: int
    head_width: int
    hidden: int
    activation: Literal["relu", "gelu"] = "relu"
    embedding_norm: bool = True
    bias: bool = True


SIZES = {
    "whole_vectors": Sizes(32, 2, 16, 64),
    "odd": Sizes(38, 3, 10, 45, "gelu"),
    "wide_heads": Sizes(20, 2, 40, 70, "gelu", embedding_norm=False),
    "many_panels": Sizes(132, 4, 33, 300, bias=False),
}


class Plain:
    """A decoder's weights as random tensors, and its step as few lines of torch."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        s, inner = sizes, sizes.heads * sizes.head_width
        self.tokens, self.positions = torch.randn(VOCABULARY, s.width), torch.randn(9, s.width)
        shapes = {
            "qkv": (3 * inner, s.width),
            "self_out": (s.width, inner),
            "q": (inner, s.width),
            "cross_out": (s.width, inner),
            "first": (s.hidden, s.width),
            "second": (s.width, s.hidden),
        }
        self.layers: list[dict[str, Any]] = [
            {
                name: (torch.randn(n, k) * k**-0.5, torch.randn(n) if s.bias else None)
                for name, (n, k) in shapes.items()
            }
            | {name: self._norm() for name in NORMS}
            for _ in range(LAYERS)
        ]
        self.embedding_norm = self._norm() if s.embedding_norm else None
        self.norm = self._norm()

    def _norm(self) -> tuple[Tensor, Tensor]:
        return torch.rand(self.sizes.width) + 0.5, torch.randn(self.sizes.width)

    def packed(self) -> DecoderWeights:
        def layer(one: dict[str, Any]) -> Layer:
            parts: dict[str, Any] = {
                k: PanelMatrix.from_weight(*one[k]) for k in one if k not in NORMS
            }
            parts |= {name: _norm(one[name]) for name in NORMS}
            return Layer(**parts)

        return DecoderWeights(
            layers=[layer(one) for one in self.layers],
            tokens=self.tokens,
            positions=self.positions,
            embedding_norm=_norm(self.embedding_norm) if self.embedding_norm else None,
            norm=_norm(self.norm),
            heads=self.sizes.heads,
            head_width=self.sizes.head_width,
            activation=self.sizes.activation,
        )

    def step(self, state: "State", dtype: torch.dtype) -> Tensor:
        """The output; keys and values are written to the caches of the state."""
        s, out = self.sizes, torch.zeros(len(state.tokens), self.sizes.width, dtype=dtype)

        def normed(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
            weight, bias = norm
            return F.layer_norm(x, (s.width,), weight.to(dtype), bias.to(dtype))

        def linear(x: Tensor, matrix: tuple[Tensor, Tensor | None]) -> Tensor:
            weight, bias = matrix
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if keys.shape[1] == 0:
                return torch.zeros(s.heads * s.head_width, dtype=dtype)
            scores = torch.einsum("hd,htd->ht", q, keys.to(dtype)) * s.head_width**-0.5
            return torch.einsum("ht,htd->hd", scores.softmax(-1), values.to(dtype)).flatten()

        for row, position in enumerate(state.positions.tolist()):
            if not state.active[row]:
                continue
            place = self.positions[min(position, POSITIONS - 1)]
            x = self.tokens[state.tokens[row]].to(dtype) + place.to(dtype)
            if self.embedding_norm:
                x = normed(x, self.embedding_norm)
            for number, one in enumerate(self.layers):
                q, k, v = linear(normed(x, one["self_norm"]), one["qkv"]).view(3, s.heads, -1)
                own = state.own[number, :, row, ..., : s.head_width]
                own[0, :, position], own[1, :, position] = k, v
                x = x + linear(attend(q, *own[:, :, : position + 1]), one["self_out"])
                q = linear(normed(x, one["cross_norm"]), one["q"]).view(s.heads, -1)
                sequence = row // state.hypotheses
                speech = state.speech[number, :, sequence, :, : state.frames[sequence]]
                x = x + linear(attend(q, *speech[..., : s.head_width]), one["cross_out"])
                y = linear(normed(x, one["forward_norm"]), one["first"])
                x = x + linear(getattr(F, s.activation)(y), one["second"])
            out[row] = normed(x, self.norm)
        return out


@dataclass
class State:
    """What a step reads and writes."""

    tokens: Tensor
    positions: Tensor
    active: Tensor
    frames: list[int]
    own: Tensor
    speech: Tensor
    hypotheses: int = 1

    @classmethod
    def random(cls, sizes: Sizes, rows: int = 7, hypotheses: int = 1) -> "State":
        sequences = rows // hypotheses
        pad = max(32, sizes.head_width)
        frames = [0, 48, 1, 17, 16, 33, 5][:sequences]
        state = cls(
            torch.randint(VOCABULARY, (rows,)),
            torch.tensor([0, 31, 15, 16, 3, 8, 9])[:rows],
            torch.tensor([1, 1, 1, 1, 0, 1, 1])[:rows],
            frames,
            torch.randn(LAYERS, 2, rows, sizes.heads, ROOM, pad),
            torch.randn(LAYERS, 2, sequences, sizes.heads, FRAMES, pad),
            hypotheses,
        )
        # As the caches have it: what is past the width of a head is zero.
        for cache in (state.own, state.speech):
            cache[..., sizes.head_width :] = 0
        return state

    def copy(self, dtype: torch.dtype = torch.float32) -> "State":
        caches = {"own": self.own.to(dtype, copy=True), "speech": self.speech.to(dtype)}
        return replace(self, positions=self.positions.clone(), **caches)

    def only(self, row: int) -> "State":
        """A state of one of the rows; without hypotheses."""
        assert self.hypotheses == 1
        one = slice(row, row + 1)
        tokens, positions, active = self.tokens[one], self.positions[one], self.active[one]
        own, speech = self.own[:, :, one].contiguous(), self.speech[:, :, one].contiguous()
        return State(tokens, positions.clone(), active, self.frames[one], own, speech)


def _norm(norm: tuple[Tensor, Tensor]) -> Norm:
    weight, bias = norm
    return Norm(weight, bias, 1e-5)


def run(weights: DecoderWeights, state: State, instructions: int = 0, most: int = 99) -> Tensor:
    return weights.step(
        state.tokens,
        state.positions,
        state.active,
        state.frames,
        self_cache=Cache(state.own),
        cross_cache=Cache(state.speech),
        hypotheses=state.hypotheses,
        most_position=most,
        instructions=instructions,
    )


@pytest.fixture(params=SIZES)
def plain(request: pytest.FixtureRequest) -> Plain:
    return Plain(SIZES[request.param])


@pytest.mark.parametrize("hypotheses", [1, 2, 3])
def test_a_step(plain: Plain, hypotheses: int, instructions: int) -> None:
    state = State.random(plain.sizes, rows=7 // hypotheses * hypotheses, hypotheses=hypotheses)
    exact, usual, found = state.copy(torch.float64), state.copy(), state.copy()
    gold = plain.step(exact, torch.float64)
    # Many roundings follow each other: compare with those of torch, not with a guessed bound.
    bound = 4 * (plain.step(usual, torch.float32).double() - gold).abs().max() + 2e-6
    y = run(plain.packed(), found, instructions)
    assert (y.double() - gold).abs().max() <= bound
    assert (found.own.double() - exact.own).abs().max() <= bound
    assert torch.equal(found.speech, state.speech)
    assert torch.equal(found.positions, state.positions + state.active)
    idle = state.active == 0
    assert not y[idle].any()
    assert torch.equal(found.own[:, :, idle], state.own[:, :, idle])


def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads(
    plain: Plain, instructions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, weights = State.random(plain.sizes), plain.packed()
    together = state.copy()
    y = run(weights, together, instructions)
    for row in range(len(y)):
        alone = state.only(row)
        assert torch.equal(run(weights, alone, instructions)[0], y[row]), row
        assert torch.equal(alone.own[:, :, 0], together.own[:, :, row]), row
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    # Small steps take one thread: rows of the same, many times, make it a large one.
    times = 200
    many = State(
        state.tokens.repeat(times),
        state.positions.repeat(times),
        state.active.repeat(times),
        state.frames * times,
        state.own.repeat(1, 1, times, 1, 1, 1),
        state.speech.repeat(1, 1, times, 1, 1, 1),
    )
    assert torch.equal(run(weights, many, instructions), y.repeat(times, 1))
    assert torch.equal(many.own, together.own.repeat(1, 1, times, 1, 1, 1))


def test_positions_stop_at_the_last(plain: Plain) -> None:
    state = State.random(plain.sizes)
    run(plain.packed(), state, most=16)
    assert state.positions.tolist() == [1, 16, 16, 16, 3, 9, 10]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", VOCABULARY, "below 19.* 19 at position 31 with 48 frames in row 1"),
        ("tokens", -1, "-1 at position 31"),
        ("positions", ROOM, "below 32.* at position 32"),
        ("positions", -1, "at position -1"),
        ("frames", FRAMES + 1, "at most 48 frames.* 49 frames in row 1"),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, value: int, message: str) -> None:
    plain = Plain(SIZES["odd"])
    state = State.random(plain.sizes)
    getattr(state, name)[1] = value
    before = state.copy()
    with pytest.raises(ValueError, match=message):
        run(plain.packed(), state)
    assert torch.equal(state.own, before.own)
    assert torch.equal(state.positions, before.positions)
    # Nobody reads the token of an idle row.
    state.active[1] = 0
    run(plain.packed(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"own": torch.zeros(2, 2, 7, 3, 31, 32)}, "`self_cache` must have shape"),
        ({"own": torch.zeros(2, 2, 6, 3, 32, 32)}, "`self_cache` must have at least 7 rows"),
        ({"own": torch.zeros(2, 2, 7, 3, 32, 32).double()}, "`self_cache` must be float32"),
        ({"speech": torch.zeros(1, 2, 7, 3, 32, 32)}, "`cross_cache` must have shape"),
        ({"frames": [1]}, "`frames` must be of 7 rows / 1 hypotheses"),
        ({"tokens": torch.zeros(7)}, "`tokens` must be int64"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, "`positions` must have shape"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    plain = Plain(SIZES["odd"])
    with pytest.raises(ValueError, match=message):
        run(plain.packed(), replace(State.random(plain.sizes), **change))


def test_bad_weights_are_refused() -> None:
    plain = Plain(SIZES["odd"])
    plain.layers[1]["second"] = torch.zeros(38, 44), None
    with pytest.raises(ValueError, match=r"`layers\[1\].second` must map 45 channels to 38"):
        plain.packed()
    with pytest.raises(ValueError, match="`weight` must be float32"):
        PanelMatrix.from_weight(torch.zeros(3, 3).double(), None)


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
@pytest.mark.parametrize("classes", [None, 1, 30, 33, 64, 129])
def test_the_largest_logit(rows: int, classes: int | None, instructions: int) -> None:
    # Whole numbers: sums are exact, and many logits are equal.
    hidden, weight = torch.randint(-2, 3, (rows, 6)).float(), torch.randint(-2, 3, (200, 6)).float()
    bias = torch.randint(-2, 3, (200,)).float()
    matrix = PanelMatrix.from_weight(weight, bias)
    expected = (hidden @ weight.T + bias)[:, :classes].argmax(-1)
    found = cpu_decoder.largest_logit(hidden, matrix, classes, instructions=instructions)
    assert torch.equal(found, expected)


def test_nan_is_the_largest_as_for_torch(instructions: int) -> None:
    weight = torch.randn(70, 4)
    weight[[11, 50]] = torch.nan
    hidden = torch.randn(3, 4)
    found = cpu_decoder.largest_logit(
        hidden, PanelMatrix.from_weight(weight, None), instructions=instructions
    )
    assert torch.equal(found, (hidden @ weight.T).argmax(-1))
    nothing = PanelMatrix.from_weight(torch.full((40, 4), torch.nan), None)
    assert cpu_decoder.largest_logit(hidden, nothing, instructions=instructions).tolist() == [0] * 3


def test_the_largest_logit_is_the_same_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, matrix = (
        torch.randn(50, 64),
        PanelMatrix.from_weight(torch.randn(1000, 64), torch.randn(1000)),
    )
    one = cpu_decoder.largest_logit(hidden, matrix)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(cpu_decoder.largest_logit(hidden, matrix), one)


def test_classes_out_of_range_are_refused() -> None:
    matrix = PanelMatrix.from_weight(torch.ones(5, 2), None)
    for classes in (0, 6):
        with pytest.raises(ValueError, match="`classes` must be in 1 to 5"):
            cpu_decoder.largest_logit(torch.ones(1, 2), matrix, classes)
    with pytest.raises(ValueError, match="`hidden` must have shape"):
        cpu_decoder.largest_logit(torch.ones(1, 3), matrix)
