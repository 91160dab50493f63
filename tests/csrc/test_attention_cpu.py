"""Packed attention on CPUs (csrc/attention_cpu.cpp), against the references."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias, attention, guided_attention
from effasr_kernels.attention import reference
from effasr_kernels.guided_attention import reference as guided_reference
from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS, assert_no_worse, poison
from tests.csrc.native_attention import NOT_ON_THIS_MACHINE, NativeAttention

HEADS = 2
LENGTHS = (5, 0, 33, 1, 70)
CROSS = (10, 3, 0, 40, 7), (150, 0, 17, 35, 1)
KINDS = "plain", "causal", "cross", "relative", "relative_causal", "relative_cross"

Results = dict[str, Tensor]


@pytest.fixture(params=["base", "avx2", "avx512"])
def native(request: pytest.FixtureRequest, library: ctypes.CDLL) -> NativeAttention:
    """The build for each set of instructions."""
    found = NativeAttention(library, request.param)
    if not found.runs_here():
        pytest.skip(f"this machine has no {request.param}")
    return found


@pytest.fixture
def best(library: ctypes.CDLL) -> NativeAttention:
    """The build that this machine takes by default."""
    return NativeAttention(library)


def _layouts(kind: str, lengths: Sequence[int], tail: int = 2) -> tuple[PackedLayout, PackedLayout]:
    crossed = lengths if "cross" not in kind else CROSS[1][: len(lengths)]
    queries = lengths if "cross" not in kind else CROSS[0][: len(lengths)]
    made = [PackedLayout.from_lengths(x, rows=sum(x) + tail) for x in (queries, crossed)]
    return made[0], made[1] if "cross" in kind else made[0]


def _inputs(
    layouts: tuple[PackedLayout, PackedLayout], kind: str, width: int, spread: float = 1.0
) -> Results:
    shape = HEADS, width
    q, k, v = (torch.randn(layouts[i].rows, *shape) * spread for i in (0, 1, 1))
    inputs = {"q": q, "k": k, "v": v}
    if "relative" in kind:
        # Longer than any sequence needs.
        rows = 2 * max(layout.max_seqlen for layout in layouts) + 3
        inputs |= {"content_bias": torch.randn(shape), "position_bias": torch.randn(shape)}
        inputs["table"] = torch.randn(rows, *shape)
    return inputs


Call = Callable[..., tuple[Tensor, ...]]


def _evaluate(call: Call, inputs: Results, upstream: Sequence[Tensor]) -> Results:
    """Results and gradients of ``call(q, k, v, position)``."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    q, k, v, *biases = leaves.values()
    results = call(q, k, v, RelativeBias(*biases) if biases else None)
    gradients = torch.autograd.grad(
        results, list(leaves.values()), upstream, materialize_grads=True
    )
    found = {f"result {i}": x.detach() for i, x in enumerate(results)}
    return found | {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}


def _native_call(native: NativeAttention, layouts: tuple[PackedLayout, PackedLayout]) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, position: RelativeBias | None) -> tuple[Tensor, ...]:
        out, penalty = native(q, k, v, *layouts, position)
        return (out,) if penalty is None else (out, penalty)

    return call


def _reference_call(native: NativeAttention, layouts: tuple[PackedLayout, PackedLayout]) -> Call:
    options: dict[str, Any] = {
        "scale": native.scale,
        "dropout": native.dropout,
        "seed": native.seed,
        "backend": "reference",
    }

    def call(q: Tensor, k: Tensor, v: Tensor, position: RelativeBias | None) -> tuple[Tensor, ...]:
        if native.sigma is not None:
            return guided_attention(q, k, v, *layouts, sigma=native.sigma, **options)
        causal = native.causal
        return (attention(q, k, v, *layouts, causal=causal, position=position, **options),)

    return call


def _upstream(
    native: NativeAttention, layouts: tuple[PackedLayout, PackedLayout], width: int
) -> list[Tensor]:
    upstream = [torch.randn(layouts[0].rows, HEADS, width)]
    return [*upstream, torch.randn(layouts[0].rows, HEADS)] if native.sigma else upstream


def _assert_agrees(
    native: NativeAttention,
    layouts: tuple[PackedLayout, PackedLayout],
    inputs: Results,
    slack: float = 2.0,
) -> Results:
    upstream = _upstream(native, layouts, inputs["q"].shape[-1])
    actual = _evaluate(_native_call(native, layouts), inputs, upstream)
    call = _reference_call(native, layouts)
    baseline = _evaluate(call, inputs, upstream)
    wide = {name: x.double() for name, x in inputs.items()}
    gold = _evaluate(call, wide, [x.double() for x in upstream])
    for name, expected in gold.items():
        assert_no_worse(actual[name], expected, baseline[name], slack)
    return actual


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*AWKWARD_LENGTHS, "mixed"])
def test_matches_the_reference(native: NativeAttention, name: str, kind: str) -> None:
    layouts = _layouts(kind, AWKWARD_LENGTHS.get(name, LENGTHS))
    native = native.with_options(causal="causal" in kind)
    _assert_agrees(native, layouts, _inputs(layouts, kind, 24))


@pytest.mark.parametrize("width", [1, 5, 8, 16, 17, 32, 64, 80, 256])
@pytest.mark.parametrize("kind", ["plain", "relative"])
def test_matches_at_any_width(native: NativeAttention, width: int, kind: str) -> None:
    layouts = _layouts(kind, LENGTHS)
    _assert_agrees(native, layouts, _inputs(layouts, kind, width))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [31, 32, 33, 127, 128, 129, 161, 513])
def test_matches_at_the_edges_of_tiles(best: NativeAttention, length: int, kind: str) -> None:
    """Of panels of queries, tiles of keys, and parts of the backward."""
    queries = PackedLayout.from_lengths([length, 1])
    keys = PackedLayout.from_lengths([2 * length - 20, 40]) if "cross" in kind else queries
    inputs = _inputs((queries, keys), kind, 16)
    _assert_agrees(best.with_options(causal="causal" in kind), (queries, keys), inputs)


def test_matches_where_a_long_sequence_is_divided(native: NativeAttention) -> None:
    for causal in (False, True):
        layout = PackedLayout.from_lengths([3, 1100])
        inputs = _inputs((layout, layout), "relative", 8)
        _assert_agrees(native.with_options(causal=causal), (layout, layout), inputs)


def test_large_scores_do_not_overflow(native: NativeAttention) -> None:
    layouts = _layouts("relative", LENGTHS)
    inputs = _inputs(layouts, "relative", 32, spread=12.0)
    # The rounding of scores of several hundred depends on the order of their sums.
    _assert_agrees(native.with_options(scale=1.0), layouts, inputs, slack=4.0)


def test_another_scale(native: NativeAttention) -> None:
    layouts = _layouts("relative", LENGTHS)
    for scale in (0.03, -0.4):
        inputs = _inputs(layouts, "relative", 16)
        _assert_agrees(native.with_options(scale=scale), layouts, inputs)


@pytest.mark.parametrize("sigma", [0.05, 0.4, 30.0])
def test_matches_guided_attention(native: NativeAttention, sigma: float) -> None:
    """A wide diagonal's penalties are small: their digits must not be lost beside 1."""
    native = native.with_options(sigma=sigma)
    for kind in ("cross", "plain"):
        layouts = _layouts(kind, LENGTHS)
        _assert_agrees(native, layouts, _inputs(layouts, kind, 24))


class _PhiloxDropout:
    """Drops what `effasr_kernels.shared.philox` says, in the place of the references' dropout."""

    def __init__(self, probability: float, seed: int | None, device: torch.device):
        self.probability, self.seed, self.sequence = probability, seed or 0, -1

    def __call__(self, weights: Tensor) -> Tensor:
        self.sequence += 1
        if not self.probability:
            return weights
        heads, rows, columns = (np.arange(n, dtype=np.uint64) for n in weights.shape)
        h, i, j = np.meshgrid(heads, rows, columns, indexing="ij")
        counters = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, h, h * 0 + self.sequence
        choice = (i // 8 % 2 * 2 + j // 8 % 2).astype(np.int64)
        words = np.choose(choice, _philox(self.seed, counters))
        halves = np.where(j % 2 == 1, words >> 16, words & 0xFFFF)
        keep = torch.from_numpy(halves >= int(self.probability * 2**16 + 0.5))
        return weights * keep / (1 - self.probability)


def _philox(key: int, counters: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Philox 4x32 with 7 rounds: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405."""
    word = np.uint64(2**32 - 1)
    c = [x.astype(np.uint64) for x in counters]
    k = [key & 2**32 - 1, key >> 32]
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> 32 ^ c[1] ^ np.uint64(k[0]), b & word, a >> 32 ^ c[3] ^ np.uint64(k[1]), a & word]
        k = [(k[0] + 0x9E3779B9) & 2**32 - 1, (k[1] + 0xBB67AE85) & 2**32 - 1]
    return c


@pytest.mark.parametrize("kind", ["plain", "relative_causal", "cross", "guided_cross"])
def test_drops_what_the_gpu_kernels_drop(
    native: NativeAttention, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "Dropout", _PhiloxDropout)
    monkeypatch.setattr(guided_reference, "Dropout", _PhiloxDropout)
    # The references draw in turn, and pass over sequences without a pair.
    lengths = ([5, 33, 1, 70], [150, 17, 35, 1]) if "cross" in kind else ([5, 33, 140],) * 2
    queries, keys = (PackedLayout.from_lengths(x) for x in lengths)
    native = native.with_options(
        dropout=0.25,
        seed=2**61 + 12345,
        causal="causal" in kind,
        sigma=0.3 if "guided" in kind else None,
    )
    _assert_agrees(native, (queries, keys), _inputs((queries, keys), kind, 16))


def _assert_equal(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


def _full(native: NativeAttention, lengths: Sequence[int], **changed: Any) -> Callable[[], Results]:
    """Everything at once, on the same inputs at every call."""
    layout = PackedLayout.from_lengths(lengths)
    inputs = _inputs((layout, layout), "relative", 24)
    upstream = [torch.randn(layout.rows, HEADS, 24)]
    call = _native_call(native.with_options(dropout=0.1, **changed), (layout, layout))
    return partial(_evaluate, call, inputs, upstream)


@pytest.mark.parametrize("lengths", [LENGTHS, (900, 3, 600), (40,) * 30], ids=str)
def test_threads_change_nothing(native: NativeAttention, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    expected = _full(native, lengths)()
    for threads in (2, 3, 7):
        torch.manual_seed(3)
        _assert_equal(_full(native, lengths, threads=threads)(), expected)


def test_the_batch_changes_nothing(native: NativeAttention) -> None:
    """Bitwise, whatever lies beside a sequence and wherever it begins."""
    lengths = LENGTHS
    together = PackedLayout.from_lengths(lengths, rows=sum(lengths) + 5)
    inputs = _inputs((together, together), "relative", 24)
    upstream = [torch.randn(together.rows, HEADS, 24)]
    found = _evaluate(_native_call(native, (together, together)), inputs, upstream)
    shared = {name: x for name, x in inputs.items() if name not in "qkv"}
    for begin, length in zip(together.cu_seqlens_host, lengths, strict=False):
        own = slice(begin, begin + length)
        alone = PackedLayout.from_lengths([length])
        parts = {name: inputs[name][own] for name in "qkv"} | shared
        call = _native_call(native, (alone, alone))
        expected = _evaluate(call, parts, [upstream[0][own]])
        for name in ("result 0", *(f"gradient of {x}" for x in "qkv")):
            assert torch.equal(found[name][own], expected[name]), name


def test_shared_gradients_are_summed_in_order(native: NativeAttention) -> None:
    """Sequences at the end that are empty, or have zero upstream gradient, leave every bit."""
    layouts = [PackedLayout.from_lengths(x) for x in (LENGTHS, (*LENGTHS, 0, 9, 0))]
    inputs = _inputs((layouts[1], layouts[1]), "relative", 24)
    upstream = torch.randn(layouts[1].rows, HEADS, 24)
    upstream[layouts[0].rows :] = 0
    results = []
    for layout in layouts:
        rows = slice(layout.rows)
        parts = inputs | {name: inputs[name][rows] for name in "qkv"}
        results.append(_evaluate(_native_call(native, (layout, layout)), parts, [upstream[rows]]))
    for name in ("content_bias", "position_bias", "table"):
        assert torch.equal(*(x[f"gradient of {name}"] for x in results)), name


@pytest.mark.parametrize("kind", ["relative", "cross"])
def test_nan_reaches_no_other_sequence(native: NativeAttention, kind: str) -> None:
    native = native.with_options(sigma=None if kind == "relative" else 0.3)
    layouts = _layouts(kind, LENGTHS)
    inputs = _inputs(layouts, kind, 24)
    upstream = _upstream(native, layouts, 24)
    call = _native_call(native, layouts)
    expected = _evaluate(call, inputs, upstream)
    tails = {
        name: poison(x, layouts[name != "q"]) if name in "qkv" else x for name, x in inputs.items()
    }
    _assert_equal(_evaluate(call, tails, [poison(x, layouts[0]) for x in upstream]), expected)
    for sequence in (0, 2):
        for poisoned in "qkv":
            layout = layouts[poisoned != "q"]
            values = poison(inputs[poisoned], layout, sequence)
            found = _evaluate(call, inputs | {poisoned: values}, upstream)
            for name in ("result 0", *(f"gradient of {x}" for x in "qkv")):
                own = layouts[name[-1] in "kv"]
                rows = slice(*own.cu_seqlens_host[sequence : sequence + 2])
                others = torch.ones(own.rows, dtype=torch.bool)
                others[rows] = False
                assert torch.equal(found[name][others], expected[name][others]), (name, poisoned)
                if name == "result 0" and layouts[1].lengths[sequence]:
                    assert bool(found[name][rows].isnan().all())


def test_tails_and_what_has_no_keys_are_zero(native: NativeAttention) -> None:
    native = native.with_options(sigma=0.3)
    layouts = _layouts("cross", LENGTHS, tail=4)
    found = _evaluate(
        _native_call(native, layouts),
        _inputs(layouts, "cross", 24),
        _upstream(native, layouts, 24),
    )
    for name, x in found.items():
        assert bool((x[layouts[name[-1] in "kv"].total :] == 0).all()), name
        assert bool(x.isfinite().all()), name
    # Three queries without keys, and 17 keys without queries.
    for name in ("result 0", "result 1", "gradient of q"):
        assert bool((found[name][10:13] == 0).all()), name
    for name in ("gradient of k", "gradient of v"):
        assert bool((found[name][150:167] == 0).all()), name


def test_no_sequences(native: NativeAttention) -> None:
    for lengths in ((), (0, 0, 0)):
        layout = PackedLayout.from_lengths(lengths, rows=3)
        inputs = _inputs((layout, layout), "relative", 8)
        upstream = [torch.randn(3, HEADS, 8)]
        found = _evaluate(_native_call(native, (layout, layout)), inputs, upstream)
        assert all(bool((x == 0).all()) for x in found.values())


def test_views_of_one_projection(native: NativeAttention) -> None:
    """Whose rows and heads lie apart, bitwise as copies."""
    layout = PackedLayout.from_lengths(LENGTHS)
    for projection, dim in (
        (torch.randn(layout.rows, 3, HEADS, 24), 1),
        (torch.randn(layout.rows, HEADS, 3, 24), 2),
    ):
        results = []
        for make in (lambda x: x, Tensor.contiguous):
            leaf = projection.detach().clone().requires_grad_()
            q, k, v = (make(x) for x in leaf.unbind(dim))
            out, _ = native(q, k, v, layout)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_memory_grows_with_rows_not_pairs(best: NativeAttention) -> None:
    """Nine thousand rows would have 324 MB of scores."""
    layout = PackedLayout.from_lengths([9000])
    q, k, v = (torch.randn(9000, 1, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(2 * 9000 - 1, 1, 8)
    bias = RelativeBias(torch.randn(1, 8), torch.randn(1, 8), table.requires_grad_())
    old = resource.getrlimit(resource.RLIMIT_AS)

    def allow(more: int) -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, old[1]))

    try:
        allow(100 * 2**20)
        out, _ = best(q, k, v, layout, position=bias)
        gradients = torch.autograd.grad(out.sum(), [q, k, v, table])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_instructions_that_are_not_there_are_refused(best: NativeAttention) -> None:
    assert best.runs_here()
    assert best.with_options(instructions="base").runs_here()
    layout, x = PackedLayout.from_lengths([]), torch.zeros(0, 1, 8)
    described = best._describe((x, x, x, x), (layout, layout), None, None, None)
    described.instructions = 9
    assert best._call("forward", described) == NOT_ON_THIS_MACHINE
