"""What each operation says about wrong arguments: argument, rule and value."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, full, ones, randn, tensor, zeros

import effasr_kernels
from effasr_kernels import OPERATIONS, Context, PackedLayout, RelativeBias, Rotary
from effasr_kernels.runtime.example import ExampleInputs

EXAMPLES = {
    example.label: (name, example) for name, op in OPERATIONS.items() for example in op.examples
}


def _layout(*lengths: int, rows: int | None = None, device: str = "cpu") -> PackedLayout:
    return PackedLayout.from_lengths(lengths, device, rows=rows)


def _relative(table: Tensor, content_bias: Tensor | None = None) -> RelativeBias:
    bias = zeros(2, 64)
    return RelativeBias(bias if content_bias is None else content_bias, bias, table)


# Changes of the first example of an operation, or of the one that is named.
MESSAGES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "append_to_pages": [
        ({"page_table": full((3, 2), 6).int()}, r"`page_table` must name pages in \[0, 6\)"),
        ({"positions": tensor([0, 1, 32]).int()}, r"`positions` must be less than M \* B = 32"),
    ],
    "attention, causal": [
        ({"k": randn(42, 3, 64)}, "`k` must have a number of heads that divides 2, .* but is"),
        ({"layout_k": _layout(42)}, "`layout_k` must have 3 sequences, as `layout_q` does, but is"),
        (
            {"layout_q": _layout(24, 0, 16, rows=42, device="meta")},
            "`layout_q` must be on cpu, as `q` is, but is meta",
        ),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), but is 1.0"),
        ({"position": _relative(zeros(48, 2, 64))}, "`position.table` must have an odd number"),
        ({"position": _relative(zeros(47, 64))}, r"`position.table` must have shape \(2L-1, H, D"),
        (
            {"position": _relative(zeros(45, 2, 64))},
            r"`position.table` must have at least 2 \* 24 - 1 rows, for the longest sequence",
        ),
        (
            {"position": _relative(zeros(47, 2, 64), zeros(128))},
            r"`position.content_bias` must have shape \(H, D\) = \(2, 64\), but is \(128,\)",
        ),
        (
            {"position": _relative(zeros(47, 2, 64).double())},
            r"`position.table` must be torch.float32, as `q` is, but is torch.float64",
        ),
        ({"v": randn(42, 1, 64)}, r"`v` must .*\(T_k, H, D\)"),
        (
            {name: randn(42, 1, 64) for name in "kv"} | {"position": _relative(zeros(47, 2, 64))},
            "`k` must have 2 heads, as `q`, where `position` is",
        ),
        (
            {"layout_k": _layout(24, 0, 16, rows=42), "causal": False, "context": Context(1)},
            "`context` must be None where keys have a layout",
        ),
        ({"context": Context(1)}, "`context` must be None with `causal`"),
        (
            {
                **{"causal": False, "context": Context(4, 0, 4)},
                "position": _relative(zeros(13, 2, 64)),
            },
            r"`position.table` must have at least 2 \* 8 - 1 rows, for all distances in the",
        ),
    ],
    "audio_windows": [
        ({"layout_slots": _layout(1)}, "`layout_slots` must have 3 sequences"),
        ({"rows_per_slot": 3}, r"`rows_per_slot` must be one of \(1, 2, 4, 8\)"),
        ({"hop": 0}, "`hop` must be at least 1"),
        ({"n_fft": 11}, "`n_fft` must be at least 1 and the window's 24"),
        ({"preemphasis": 2.0}, r"`preemphasis` must be in \[0, 1\]"),
        ({"slots": (0, 99)}, "`slots` must be a range within"),
    ],
    "batch_norm": [
        ({"mean": ones(32, requires_grad=True)}, "`mean` must not require a gradient"),
        ({x: ones(32, device="meta") for x in ("weight", "bias")}, "`weight` must be on cpu"),
        ({"eps": 0.0}, "`eps` must be positive, but is 0.0"),
    ],
    "bias_activation_dropout": [
        ({"activation": "tanh"}, "`activation` must be one of silu, relu, gelu, but is tanh"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\)"),
        ({"offset": 2**31}, r"`offset` must be in \[0, 2\^31\)"),
    ],
    "best_alignment_loss": [
        ({"layout_text": _layout(9)}, "`layout_text` must have 3 sequences, as `layout_speech`"),
    ],
    "ctc_loss": [
        (
            {
                "targets": ones(9, device="meta").long(),
                "layout_targets": _layout(5, 0, 3, rows=9, device="meta"),
            },
            "`targets` must be on cpu, as `layout_frames` is, but is meta",
        ),
        ({"targets": full((9,), 48)}, r"`targets` must hold classes in \[0, 48\).* is 48"),
        ({"targets": zeros(9).long()}, ".*other than the blank 0, but is 0"),
        ({"blank_id": 48}, r"`blank_id` must be in \[0, 48\), but is 48"),
        (
            {"layout_targets": _layout(8, rows=9)},
            "`layout_targets` must have 3 sequences, as `layout_frames` does, but is 1",
        ),
    ],
    "decode_attention, cross": [
        ({"q": zeros(11, 2, 64)}, "`q` must have a multiple of S = 3 rows"),
        ({"q": zeros(12, 3, 64)}, "`q` must have a multiple of Hk = 2 heads, as many as `k_pages`"),
        ({"q": zeros(12, 1, 64)}, "`q` must have a multiple of Hk = 2 heads"),
        ({"page_table": full((3, 2), 6).int()}, r"`page_table` must name pages in \[0, 6\)"),
        ({"page_table": full((3, 2), -1).int()}, "`page_table` must name pages"),
        ({"lengths": tensor([1, 2, 33]).int()}, r"`lengths` must be in \[0, M \* B = 32\]"),
        ({"lengths": tensor([-1, 1, 1]).int()}, "`lengths` must be in"),
        ({"new_k": zeros(3, 2, 64)}, "`new_k` and `new_v` come together"),
        ({"splits": 0}, "`splits` must be at least 1, but is 0"),
        (
            {name: zeros(12, 2, 64) for name in ("new_k", "new_v")},
            r"`new_k` must have shape \(N, Hk, D\), N = S, = \(3,",
        ),
        (
            {name: zeros(6, 0, 2, 64) for name in ("k_pages", "v_pages")},
            "`k_pages` must have pages of at least 1 row",
        ),
    ],
    "depthwise_conv": [
        ({"weight": zeros(32, 0)}, r"`weight` must have at least one tap, but is 0"),
        ({"weight": zeros(32, 4)}, ".*odd number of taps unless causal, but is 4"),
        ({"x": zeros(42, 33), "gated": True}, r"`x` must have an even width.*, but is 33"),
        ({"gated": True}, r"`weight` must have shape .* = \(16, any\)"),
    ],
    "dropout_add_layer_norm, post-norm": [
        ({"x": None}, "`x_bias` must be None where `x` is"),
        ({"bias": None}, "`bias` must be given exactly where `weight` is"),
        ({x: None for x in ("x", "x_bias", "weight", "bias")}, "`x` must be given where `weight`"),
        ({"weight": None, "bias": None}, "`weight` must be given where"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        ({"offset": -1}, r"`offset` must be in \[0, 2\^31\)"),
    ],
    "gated_activation": [
        ({"activation": "relu"}, "`activation` must be one of silu, gelu, gelu_tanh, but is relu"),
    ],
    "grouped_linear": [
        (
            {"layout": _layout(rows=42), **{"weight": zeros(0, 48, 32), "bias": zeros(0, 48)}},
            "`weight` must have at least one group",
        ),
    ],
    "guided_attention": [
        ({"sigma": 0.0}, "`sigma` must be positive, but is 0.0"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\), but is -0.1"),
    ],
    "linear_cross_entropy": [
        ({"targets": full((9,), 48)}, r"`targets` must hold .* \[0, 48\) .*, but is 48"),
        ({"targets": full((9,), -1)}, r"`targets` must hold .* or be -100, but is -1"),
        ({"label_smoothing": 1.5}, r"`label_smoothing` must be in \[0, 1\], but is 1.5"),
        ({"z_loss": -1.0}, "`z_loss` must be at least 0, but is -1.0"),
    ],
    "mask_features": [
        ({"rows_per_slot": 3}, r"`rows_per_slot` must be one of \(1, 2, 4, 8\)"),
        ({"freq_width": -1}, "`freq_width` must be at least 0"),
        ({"time_width": 5.0}, r"`time_width` must be in \[0, 1\]"),
    ],
    "normalize_features": [
        ({"rows_per_slot": 16}, r"`rows_per_slot` must be one of \(1, 2, 4, 8\)"),
        ({"eps": 0.0}, "`eps` must be positive"),
        ({"log_guard": -1.0}, "`log_guard` must be at least 0"),
    ],
    "projected_top_k": [
        ({"k": 0}, r"`k` must be in \[1, 16\]"),
        ({"k": 17}, r"`k` must be in \[1, 16\], at most 16 and the number of classes, but is 17"),
        ({"classes": 0}, r"`classes` must be in \[1, V = 48\], but is 0"),
        ({"classes": 49}, r"`classes` must be in \[1, V = 48\], but is 49"),
    ],
    "rms_norm": [({"offset": 2}, "`offset` must be 0 or 1, but is 2")],
    "subsampling_stem": [
        ({"rows_per_slot": 6}, "`rows_per_slot` must be a positive multiple of 4, but is 6"),
        ({"rows_per_slot": 4}, r"`x` must have shape \(4 T, F\) = \(168, any\)"),
    ],
    "transducer_loss": [
        ({"targets": zeros(9).long()}, ".*other than the blank 0, but is 0"),
        ({"targets": full((9,), -1)}, r"`targets` must hold classes in \[0, 48\)"),
        ({"activation": "gelu"}, '`activation` must be "relu" or "tanh", but is \'gelu\''),
        ({"fastemit": -0.1}, "`fastemit` must be at least 0, but is -0.1"),
        ({"blank_id": -1}, r"`blank_id` must be in \[0, 48\), but is -1"),
        ({"sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
    ],
    "transducer_loss, durations": [
        ({"weight": zeros(50, 2)}, r"`weight` must have shape \(V \+ D, J\) = \(any, 32\)"),
        ({"bias": zeros(49)}, r"`bias` must have shape \(V \+ D,\) = \(50,\), but is \(49,\)"),
        ({"targets": full((9,), 48)}, r"`targets` must hold classes in \[0, 48\)"),
        ({"blank_id": 48}, r"`blank_id` must be in \[0, 48\), but is 48"),
        ({"durations": tuple(range(50))}, "`weight` must have more rows than .* durations"),
        ({"durations": ()}, r"`durations` must increase, .*, but is \(\)"),
        ({"durations": (0,)}, r"`durations` must increase, from 0 or more to 1 or more"),
        ({"durations": (1, 1)}, r"`durations` must increase, .*, but is \(1, 1\)"),
        ({"durations": (-1, 1)}, r"`durations` must increase"),
        ({"sigma": -0.1}, "`sigma` must be at least 0, but is -0.1"),
    ],
    "update_running_statistics": [
        ({"running_mean": ones(64)[::2]}, "`running_mean` must be contiguous"),
        ({"momentum": 1.5}, "`momentum` must be in"),
    ],
}
# Changes of a tensor that make another valid call.
ACCEPTED = {
    "append_to_pages": {"page_table size 1"},
    "attention, grouped queries": {"q size 1"},
    "audio_windows": {"window size 0"},
    "batch_norm": {"x half", "x double"},
    "bias_activation_dropout": {"x half", "bias half"},
    "decode_attention": {"page_table size 1"},
    "dropout_add_layer_norm": {"x half", "residual half"},
    "dropout_add_layer_norm, post-norm": {"x half", "residual half", "x_bias half"},
    "mask_features": {
        *("x half", "x double", "x size 1"),
        *("freq_shares size 2", "time_shares size 2"),
    },
    "normalize_features": {"x half", "x double", "x size 1"},
    "projected_top_k": {"hidden size 0"},
    "rms_norm": {"x dimensions", "x half", "x size 0", "weight half"},
}


def _call(label: str, changed: dict[str, Any]) -> str:
    """Returns the message of the refusal; none if the call is valid."""
    name, example = EXAMPLES[label]
    try:
        getattr(effasr_kernels, name)(**{**example.arguments(ExampleInputs()), **changed})
    except ValueError as error:
        return str(error)
    return ""


def _changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "dimensions", x[None]
    yield "dtype", x.long() if x.is_floating_point() else x.float()
    if x.is_floating_point():
        yield "half", x.half()
        yield "double", x.double()
    for axis in range(x.dim()):
        yield f"size {axis}", torch.cat([x, x.narrow(axis, 0, 1)], axis)


@pytest.mark.parametrize("label", EXAMPLES)
def test_tensors_have_shapes_dtypes_and_a_device(label: str) -> None:
    """Each tensor with another size, dtype or device is refused, or the one that it must suit."""
    name, example = EXAMPLES[label]
    arguments = example.arguments(ExampleInputs())
    tensors = {key: x for key, x in arguments.items() if isinstance(x, Tensor)}
    accepted = set()
    for key, x in tensors.items():
        for change, changed in _changes(x):
            if message := _call(label, {key: changed}):
                argument = key if change == "dtype" else r"[\w.]+"
                assert re.match(f"{name}: `{argument}` must ", message), f"{key}, {change}"
            else:
                accepted.add(f"{key} {change}")
    assert accepted == ACCEPTED.get(label, ACCEPTED.get(name, set()))
    anchor = "residual" if "residual" in tensors else next(iter(tensors))
    for key in tensors.keys() - {anchor}:
        message = _call(label, {key: tensors[key].to("meta")})
        assert re.match(rf"{name}: `\w+` must be on \w+, as `\w+` is, but is", message), key


@pytest.mark.parametrize(
    ("label", "changed", "message"),
    [(label, *row) for label, rows in MESSAGES.items() for row in rows],
    ids=lambda x: None if isinstance(x, dict) else x[:50],
)
def test_error_messages(label: str, changed: dict[str, Any], message: str) -> None:
    label = label if label in EXAMPLES else OPERATIONS[label].examples[0].label
    assert re.match(f"{EXAMPLES[label][0]}: {message}", _call(label, changed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 0.0}, "Rotary: `base` must be positive, but is 0.0"),
        ({"fraction": 0.0}, r"Rotary: `fraction` must be in \(0, 1\], but is 0.0"),
        ({"fraction": 1.5}, r"Rotary: `fraction` must be in \(0, 1\], but is 1.5"),
        ({"left": -1}, "`left` must be a whole number of at least 0 or None, for no limit, .* -1"),
        ({"left": 2, "right": -3}, "`right` must be a whole number of at least 0 .* but is -3"),
        ({"left": 2, "chunk": 0}, "`chunk` must be a whole number of at least 1, but is 0"),
        ({"left": 2, "chunk": None}, "`chunk` must be a whole number of at least 1, .* None"),
        ({"left": 2.5}, r"`left` must be a whole number of at least 0 .* but is 2\.5"),
    ],
)
def test_arguments_of_attention_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Context(**options) if "left" in options else Rotary(**options)
