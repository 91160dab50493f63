"""Each operation is its formula, computed in float64 with nothing of the reference.

Values alone: `test_contract.py` compares the gradients with finite differences of the values.
`attention` and `transducer_loss` have files of their own.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import pack
from effasr_kernels.shared.dropout import kept_elements
from tests.support.conformance import Case, Variation, evaluate
from tests.support.operation_cases import FACTORIES, OPTIONS
from tests.support.tolerance import AWKWARD_LENGTHS

DROPOUT = {"dropout": 0.25, "seed": 11, "offset": 2}
ODD = AWKWARD_LENGTHS["odd"]
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
}


def _dropped(x, *, dropout=0.0, seed=0, offset=0):
    return x * kept_elements(torch.tensor(seed), x.shape, dropout, offset) / (1 - dropout)


def batch_norm(p, weight, bias, *, silu=True, fixed=False):
    channels = p.x.shape[1]
    mean, variance = p.x.mean(0), p.x.var(0, correction=0)
    if fixed:
        mean, variance = torch.linspace(-1, 1, channels), torch.linspace(0.5, 1.5, channels)
    y = (p.x - mean) / (variance + 1e-5) ** 0.5 * weight + bias
    return GATES["silu"](y) if silu else y


def bias_activation_dropout(p, bias=0.0, *, activation="silu", **options):
    return _dropped(GATES[activation](p.x + bias), **options)


def dropout_add_layer_norm(p, weight=1.0, bias=0.0, x_bias=0.0, *, mode, **options):
    total = p.residual
    if not mode.startswith("norm"):
        total = total + 0.5 * _dropped(p.x + x_bias, **options)
    centred = total - total.mean(1, keepdim=True)
    y = centred / (centred.square().mean(1, keepdim=True) + 1e-5) ** 0.5 * weight + bias
    return {"addition": (total,), "post-norm": (y,)}.get(mode.partition(",")[0], (y, total))


def gated_activation(p, *, activation="silu"):
    return GATES[activation](p.gate) * p.up


def grouped_linear(p, weight, bias=None):
    rows = zip(p.x, p.group.tolist(), strict=True)
    return torch.stack([weight[g] @ x + (0 if bias is None else bias[g]) for x, g in rows])


def linear_cross_entropy(p, weight, bias=0.0, *, label_smoothing=0.0, z_loss=0.0):
    losses = []
    for logits, target in zip(p.hidden @ weight.T + bias, p.targets.tolist(), strict=True):
        normalizer = logits.exp().sum().log()
        nats, is_counted = normalizer - logits, target != -100
        loss = (1 - label_smoothing) * nats[max(target, 0)] + label_smoothing * nats.mean()
        losses.append(is_counted * (loss + z_loss * normalizer**2))
    return torch.stack(losses)


def rms_norm(p, weight, *, offset=0):
    return (offset + weight) * p.x / ((p.x**2).mean(1, keepdim=True) + 1e-5) ** 0.5


def best_alignment_loss(p):
    """The least over all alignments of frames and tokens that do not go back."""
    pairs = (p.speech[:, None] - p.text).square().mean(2)
    frames = range(len(p.speech))
    if not frames:
        return torch.zeros(())
    alignments = itertools.combinations_with_replacement(range(len(p.text)), len(frames))
    losses = [pairs[frames, alignment].mean() for alignment in alignments]
    return min(losses, default=torch.tensor(torch.inf))


def ctc_loss(p, weight, bias, *, blank_id, **_):
    """The sum over all alignments of frames and classes."""
    log_probs = (p.hidden @ weight.T + bias).log_softmax(-1)
    frames, transcript = range(len(log_probs)), p.targets.tolist()
    likelihood = sum(
        log_probs[frames, alignment].sum().exp()
        for alignment in itertools.product(range(len(weight)), repeat=len(frames))
        if [x for x, _ in itertools.groupby(alignment) if x != blank_id] == transcript
    )
    return -torch.as_tensor(likelihood).double().log()


def depthwise_conv(p, weight, bias=None, *, causal=False, gated=False, **_):
    x, taps = F.glu(p.x) if gated else p.x, weight.shape[1]
    padded = F.pad(x.T[None], (taps - 1, 0) if causal else (taps // 2, taps // 2))
    return F.conv1d(padded, weight[:, None], bias, groups=len(weight))[0].T if len(x) else x


def guided_attention(p, *, sigma=0.3):
    y, penalties = torch.zeros_like(p.q), torch.zeros(p.q.shape[:2])
    for i, h in itertools.product(range(len(p.q)), range(p.q.shape[1]) if len(p.k) else ()):
        weights = (p.k[:, h] @ p.q[i, h] / p.q.shape[2] ** 0.5).softmax(0)
        y[i, h] = weights @ p.v[:, h]
        distances = i / len(p.q) - torch.arange(len(p.k)).double() / len(p.k)
        penalties[i, h] = weights @ (1 - (-(distances**2) / (2 * sigma**2)).exp())
    return y, penalties


def _strided_conv(x, weight, bias, groups=1):
    return F.conv2d(x, weight.view(-1, 1, 3, 3), bias, stride=2, padding=1, groups=groups)


def _in_slots(y, rows):
    """Of channels, rows and bands; what is not real is zero."""
    return F.pad(y.permute(1, 2, 0), (0, 0, 0, 0, 0, rows - y.shape[1]))


def strided_depthwise(p, weight, bias, *, relu=False, **_):
    x = p.x.flatten(0, 1)[: int(p.length)].permute(2, 0, 1)[None]
    x = x.relu() if relu else x
    return _in_slots(_strided_conv(x, weight, bias, len(weight))[0], len(p.x)) if x.numel() else ()


def subsampling_stem(p, weight, bias, depthwise_weight, depthwise_bias, *, per_slot=8, **_):
    x = p.x.flatten(0, 1)[: int(p.length)]
    if not len(x):
        return ()
    x = _strided_conv(x[None, None], weight, bias).relu()
    x = _strided_conv(x, depthwise_weight, depthwise_bias, len(depthwise_weight))[0]
    return _in_slots(x, per_slot // 4 * len(p.x)).unflatten(0, (len(p.x), -1)).flatten(1, 2)


BY_ROW = {
    *(batch_norm, bias_activation_dropout, dropout_add_layer_norm, gated_activation),
    *(grouped_linear, linear_cross_entropy, rms_norm),
}
"""These take the rows of all sequences at a time."""
BY_SEQUENCE = {
    *(best_alignment_loss, ctc_loss, depthwise_conv, guided_attention),
    *(strided_depthwise, subsampling_stem),
}
FORMULAS = {formula.__name__: formula for formula in BY_ROW | BY_SEQUENCE}
RAGGED = (ODD, AWKWARD_LENGTHS["empty_among_others"], AWKWARD_LENGTHS["long_among_short"])
MORE: dict[str, Iterable[tuple[tuple[int, ...], dict[str, Any]]]] = {
    "batch_norm": [(ODD, {"silu": False, "fixed": True})],
    "best_alignment_loss": [
        # Five frames and four tokens, more tokens than frames, and none of either.
        ((5, 2, 3, 0, 4), {"tokens": (4, 6, 0, 2, 1)}),
    ],
    "bias_activation_dropout": [(ODD, {"activation": "relu", **DROPOUT})],
    "ctc_loss": [
        # Empty and repeated labels, and more labels than fit.
        *(
            ((4,) * 8, {"transcripts": (0, 1, 2, 2, 3, 3, 4, 5), "classes": 3, "blank_id": blank})
            for blank in (0, 1, 2)
        ),
        ((0, 0, 1, 1, 1), {"transcripts": (0, 1, 0, 1, 2), "classes": 3, "blank_id": 1}),
        ((5, 4, 3, 2), {"transcripts": (3, 3, 2, 2), "classes": 2, "blank_id": 0}),
    ],
    "depthwise_conv": [
        (lengths, {"taps": taps, "causal": causal, "bias": taps > 1, "gated": taps == 9})
        for lengths in RAGGED
        for taps in (1, 3, 9)
        for causal in (False, True)
    ],
    "dropout_add_layer_norm": [
        (ODD, {"mode": mode, **DROPOUT})
        for mode in ("pre-norm", "pre-norm, bias", "post-norm, bias", "addition, bias")
    ],
    "grouped_linear": [((7,), {"sizes": (0, 7, 0), "bias": False})],
    "linear_cross_entropy": [
        *((ODD, {"bias": bias}) for bias in (False, True)),
        (ODD, {"label_smoothing": 1.0, "z_loss": 0.5}),
    ],
    "strided_depthwise": [
        ((3, 0, 1, 9), {"bins": bins, "relu": bins == 6, "nan": bins == 2}) for bins in (2, 6)
    ],
    "subsampling_stem": [((1,) * 8, {"per_slot": x, "nan": x == 8}) for x in (4, 8)],
}
CASES = [
    *((name, *row) for name, rows in MORE.items() for row in rows),
    *(
        (name, lengths, options)
        # The alignments of all frames would be too many to list.
        for name in FORMULAS.keys() - {"best_alignment_loss", "ctc_loss"}
        for options in OPTIONS[name]
        for lengths in RAGGED
    ),
]


def _expected(name: str, case: Case, options: dict[str, Any]) -> list[Tensor]:
    """Each result, of all sequences."""
    formula = FORMULAS[name]
    of_tensors = ("bias", "bins", "classes", "sizes", "taps", "tokens", "transcripts", "width")
    rules = {k: v for k, v in options.items() if k not in of_tensors}
    pieces = list(zip(*case.packed.values(), strict=True))
    if formula in BY_ROW:
        pieces = [[torch.cat(list(x)) for x in case.packed.values()]]
    results = []
    for values in pieces:
        piece = SimpleNamespace(**dict(zip(case.packed, values, strict=True)))
        found = formula(piece, **case.shared, **rules)
        found = (found,) if isinstance(found, Tensor) else found
        results += [found] if found else []
    rows = [[x[None] if x.ndim == 0 else x for x in found] for found in results]
    return [torch.cat(x) for x in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("name", "lengths", "options"), sorted(CASES, key=lambda case: case[0]), ids=str
)
def test_operation_is_its_formula(
    name: str, lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = FACTORIES[name](lengths, **options)(None)
    results = case.run({k: pack(list(x)) for k, x in case.packed.items()}, case.shared)
    results = (results,) if isinstance(results, Tensor) else results
    for result, expected in zip(results, _expected(name, case, options), strict=True):
        torch.testing.assert_close(result, expected.to(result))


def test_the_table_has_every_operation() -> None:
    assert set(FORMULAS) == set(FACTORIES) - {"attention", "transducer_loss"}


@pytest.mark.parametrize(
    ("name", "limit", "values"),
    [
        ("linear_cross_entropy", "_LARGEST", (24,)),
        ("strided_depthwise", "_SLOTS", (1, 2, 3, 5)),
        ("subsampling_stem", "_SLOTS", (1, 2, 3, 5)),
    ],
)
def test_dividing_a_batch_changes_nothing(
    name: str, limit: str, values: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references take a few slots or logits at a time."""
    options = {"differentiable": True} if name == "subsampling_stem" else {}
    case = FACTORIES[name]((4, 1, 0, 7), **options)("reference")
    whole = evaluate(case, Variation(tail=2))
    for value in values:
        monkeypatch.setattr(import_module(f"effasr_kernels.{name}.reference"), limit, value)
        divided = evaluate(case, Variation(tail=2))
        torch.testing.assert_close((divided.rows, divided.shared), (whole.rows, whole.shared))
