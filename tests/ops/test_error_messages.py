"""What each operation says about wrong arguments: argument, rule and value."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, full, ones, rand, tensor, zeros

import effasr_kernels
from effasr_kernels import OPERATIONS, Context, PackedLayout, RelativeBias, Rotary


def _layout(*lengths: int, rows: int | None = None, device: str = "cpu") -> PackedLayout:
    return PackedLayout.from_lengths(lengths, device, rows=rows)


def _relative(table: Tensor, content_bias: Tensor | None = None) -> RelativeBias:
    bias = zeros(2, 4)
    return RelativeBias(bias if content_bias is None else content_bias, bias, table)


VALID: dict[str, dict[str, Any]] = {
    "append_to_pages": {
        **{name: zeros(2, 2, 8) for name in "kv"},
        **{name: zeros(4, 4, 2, 8) for name in ("k_pages", "v_pages")},
        "page_table": zeros(2, 3, dtype=torch.int32),
        "positions": tensor([0, 1], dtype=torch.int32),
    },
    "attention": {**{name: zeros(4, 2, 4) for name in "qkv"}, "layout_q": _layout(1, 3)},
    "audio_windows": {
        "audio": zeros(121).double(),
        "window": ones(12).double(),
        "layout_audio": _layout(53, 0, 19, 40, rows=121),
        "layout_slots": _layout(3, 0, 1, 2, rows=8),
        **{"rows_per_slot": 4, "hop": 5, "n_fft": 17, "preemphasis": 0.9},
    },
    "batch_norm": {
        "x": ones(4, 2),
        **{name: ones(2) for name in ("weight", "bias", "mean", "variance")},
        "layout": _layout(4),
    },
    "bias_activation_dropout": {
        **{"x": zeros(2, 4), "bias": zeros(4), "layout": _layout(2)},
        "activation": "silu",
    },
    "best_alignment_loss": {
        **{"speech": zeros(4, 3), "text": zeros(2, 3)},
        **{"layout_speech": _layout(1, 3), "layout_text": _layout(1, 1)},
    },
    "ctc_loss": {
        **{"hidden": zeros(4, 3), "weight": zeros(6, 3), "bias": zeros(6), "blank_id": 0},
        "targets": ones(2).long(),
        **{"layout_frames": _layout(1, 3), "layout_targets": _layout(1, 1)},
    },
    "decode_attention": {
        "q": zeros(4, 2, 8),
        **{name: zeros(4, 4, 2, 8) for name in ("k_pages", "v_pages")},
        "page_table": zeros(2, 3, dtype=torch.int32),
        "lengths": tensor([1, 2], dtype=torch.int32),
    },
    "depthwise_conv": {
        **{"x": zeros(4, 3), "weight": zeros(3, 3), "bias": zeros(3)},
        "layout": _layout(1, 3),
    },
    "dropout_add_layer_norm": {
        **{name: zeros(2, 4) for name in ("residual", "x")},
        **{name: zeros(4) for name in ("weight", "bias", "x_bias")},
        "layout": _layout(2),
    },
    "gated_activation": {**{"gate": zeros(2, 4), "up": zeros(2, 4), "activation": "silu"}},
    "grouped_linear": {
        **{"x": zeros(3, 2), "weight": zeros(2, 5, 2), "bias": zeros(2, 5)},
        "layout": _layout(1, 2),
    },
    "guided_attention": {
        **{name: zeros(4, 2, 3) for name in "qkv"},
        **{"layout_q": _layout(1, 3), "layout_k": _layout(1, 3), "sigma": 0.3},
    },
    "linear_cross_entropy": {
        **{"hidden": zeros(3, 4), "weight": zeros(6, 4), "bias": zeros(6)},
        "targets": zeros(3).long(),
    },
    "mask_features": {
        **{"x": ones(36, 6), "lengths": tensor([7, 0, 16, 1])},
        "layout": _layout(2, 0, 4, 1, rows=9),
        "rows_per_slot": 4,
        **{"freq_shares": rand(2, 4, 2), "freq_width": 3},
        **{"time_shares": rand(2, 4, 3), "time_width": 0.5},
    },
    "normalize_features": {
        **{"x": ones(36, 3), "lengths": tensor([7, 0, 16, 1])},
        "layout": _layout(2, 0, 4, 1, rows=9),
        "rows_per_slot": 4,
    },
    "projected_top_k": {
        **{"hidden": zeros(2, 3), "weight": zeros(9, 3), "bias": zeros(9)},
        "k": 1,
    },
    "rms_norm": {"x": zeros(2, 4), "weight": zeros(4), "eps": 1e-5},
    "strided_depthwise": {
        **{"x": zeros(4, 4, 3), "weight": zeros(3, 9), "bias": zeros(3)},
        **{"layout": _layout(2), "lengths": tensor([4])},
    },
    "subsampling_stem": {
        "x": zeros(16, 8),
        **{"weight": zeros(3, 9), "bias": zeros(3)},
        **{"depthwise_weight": zeros(3, 9), "depthwise_bias": zeros(3)},
        **{"layout": _layout(2), "lengths": tensor([16])},
    },
    "transducer_loss": {
        **{"encoded": zeros(4, 3), "predicted": zeros(5, 3)},
        "targets": ones(3).long(),
        **{"layout_frames": _layout(1, 3), "layout_targets": _layout(1, 2)},
        **{"weight": zeros(6, 3), "bias": zeros(6), "blank_id": 0},
    },
    "update_running_statistics": {
        **{name: ones(3) for name in ("running_mean", "running_variance")},
        "num_batches": tensor(0),
        **{name: ones(3) for name in ("mean", "variance")},
        "layout": _layout(2),
    },
}
MESSAGES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "append_to_pages": [
        ({"page_table": full((2, 3), 4).int()}, r"`page_table` must name pages in \[0, 4\)"),
        ({"positions": tensor([0, 12]).int()}, r"`positions` must be less than M \* B = 12"),
    ],
    "attention": [
        (
            {"k": zeros(4, 3, 4)},
            r"`k` must have a number of heads that divides 2, .* but is \(4, 3, 4\)",
        ),
        (
            {"layout_k": _layout(4)},
            "`layout_k` must have 2 sequences, as `layout_q` does, but is 1",
        ),
        (
            {"layout_q": _layout(1, 3, device="meta")},
            "`layout_q` must be on cpu, as `q` is, but is meta",
        ),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), but is 1.0"),
        ({"position": _relative(zeros(6, 2, 4))}, "`position.table` must have an odd number"),
        (
            {"position": _relative(zeros(7, 4))},
            r"`position.table` must have shape \(2L-1, H, D\)",
        ),
        (
            {"position": _relative(zeros(3, 2, 4))},
            r"`position.table` must have at least 2 \* 3 - 1 rows, for the longest sequence",
        ),
        (
            {"position": _relative(zeros(5, 2, 4), zeros(8))},
            r"`position.content_bias` must have shape \(H, D\) = \(2, 4\), but is \(8,\)",
        ),
        (
            {"position": _relative(zeros(5, 2, 4).double())},
            r"`position.table` must be torch.float32, as `q` is, but is torch.float64",
        ),
        ({"v": zeros(4, 1, 4)}, r"`v` must .*\(T_k, H, D\)"),
        (
            {"k": zeros(4, 1, 4), "v": zeros(4, 1, 4), "position": _relative(zeros(5, 2, 4))},
            "`k` must have 2 heads, as `q`, where `position` is",
        ),
        (
            {"layout_k": _layout(1, 3), "context": Context(1)},
            "`context` must be None where keys have a layout",
        ),
        ({"causal": True, "context": Context(1)}, "`context` must be None with `causal`"),
        (
            {
                **{name: zeros(9, 2, 4) for name in "qkv"},
                **{"layout_q": _layout(9), "context": Context(2, 0, 2)},
                "position": _relative(zeros(5, 2, 4)),
            },
            r"`position.table` must have at least 2 \* 4 - 1 rows, for all distances in the",
        ),
    ],
    "audio_windows": [
        ({"layout_slots": _layout(1)}, "`layout_slots` must have 4 sequences"),
        ({"rows_per_slot": 3}, r"`rows_per_slot` must be one of \(1, 2, 4, 8\)"),
        ({"hop": 0}, "`hop` must be at least 1"),
        ({"n_fft": 11}, "`n_fft` must be at least 1 and the window's 12"),
        ({"preemphasis": 2.0}, r"`preemphasis` must be in \[0, 1\]"),
        ({"slots": (0, 99)}, "`slots` must be a range within"),
    ],
    "batch_norm": [
        ({"mean": ones(2, requires_grad=True)}, "`mean` must not require a gradient"),
        (
            {"weight": ones(2, device="meta"), "bias": ones(2, device="meta")},
            "`weight` must be on cpu",
        ),
        ({"eps": 0.0}, "`eps` must be positive, but is 0.0"),
    ],
    "bias_activation_dropout": [
        ({"activation": "tanh"}, "`activation` must be one of silu, relu, gelu, but is tanh"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\)"),
        ({"offset": 2**31}, r"`offset` must be in \[0, 2\^31\)"),
    ],
    "best_alignment_loss": [
        ({"layout_text": _layout(2)}, "`layout_text` must have 2 sequences, as `layout_speech`"),
    ],
    "ctc_loss": [
        (
            {
                "targets": ones(2, device="meta").long(),
                "layout_targets": _layout(1, 1, device="meta"),
            },
            "`targets` must be on cpu, as `layout_frames` is, but is meta",
        ),
        ({"targets": tensor([1, 6])}, r"`targets` must hold classes in \[0, 6\).* is 6"),
        ({"targets": tensor([0, 1])}, ".*other than the blank 0, but is 0"),
        ({"blank_id": 6}, r"`blank_id` must be in \[0, 6\), but is 6"),
        (
            {"layout_targets": _layout(2)},
            "`layout_targets` must have 2 sequences, as `layout_frames` does, but is 1",
        ),
    ],
    "decode_attention": [
        ({"q": zeros(3, 2, 8)}, "`q` must have a multiple of S = 2 rows"),
        (
            {"q": zeros(4, 3, 8)},
            "`q` must have a multiple of Hk = 2 heads, as many as `k_pages`",
        ),
        ({"q": zeros(4, 1, 8)}, "`q` must have a multiple of Hk = 2 heads"),
        ({"page_table": full((2, 3), 4).int()}, r"`page_table` must name pages in \[0, 4\)"),
        ({"page_table": full((2, 3), -1).int()}, "`page_table` must name pages"),
        ({"lengths": tensor([1, 13]).int()}, r"`lengths` must be in \[0, M \* B = 12\]"),
        ({"lengths": tensor([-1, 1]).int()}, "`lengths` must be in"),
        ({"new_k": zeros(2, 2, 8)}, "`new_k` and `new_v` come together"),
        ({"splits": 0}, "`splits` must be at least 1, but is 0"),
        (
            {"new_k": zeros(4, 2, 8), "new_v": zeros(4, 2, 8)},
            r"`new_k` must have shape \(N, Hk, D\), N = S, = \(2,",
        ),
        (
            {name: zeros(4, 0, 2, 8) for name in ("k_pages", "v_pages")},
            "`k_pages` must have pages of at least 1 row",
        ),
    ],
    "depthwise_conv": [
        ({"weight": zeros(3, 0)}, r"`weight` must have at least one tap, but is 0"),
        ({"weight": zeros(3, 4)}, ".*odd number of taps unless causal, but is 4"),
        ({"x": zeros(4, 5), "gated": True}, r"`x` must have an even width.*, but is 5"),
        ({"gated": True, "x": zeros(4, 4)}, r"`weight` must have shape .* = \(2, any\)"),
    ],
    "dropout_add_layer_norm": [
        ({"x_bias": zeros(4), "x": None}, "`x_bias` must be None where `x` is"),
        ({"bias": None}, "`bias` must be given exactly where `weight` is"),
        ({"x": None, "weight": None, "bias": None}, "`x` must be given where `weight` is not"),
        ({"weight": None, "bias": None, "prenorm": False}, "`weight` must be given where"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        ({"offset": -1}, r"`offset` must be in \[0, 2\^31\)"),
    ],
    "gated_activation": [
        ({"activation": "relu"}, "`activation` must be one of silu, gelu, gelu_tanh, but is relu"),
    ],
    "grouped_linear": [
        (
            {"layout": _layout(rows=3), "weight": zeros(0, 5, 2)},
            "`weight` must have at least one group",
        ),
    ],
    "guided_attention": [
        ({"sigma": 0.0}, "`sigma` must be positive, but is 0.0"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\), but is -0.1"),
    ],
    "linear_cross_entropy": [
        ({"targets": tensor([0, 6, 1])}, r"`targets` must hold .* \[0, 6\) .*, but is 6"),
        ({"targets": tensor([0, -1, 1])}, r"`targets` must hold .* or be -100, but is -1"),
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
        ({"k": 0}, r"`k` must be in \[1, 9\]"),
        ({"k": 10}, r"`k` must be in \[1, 9\], at most 16 and the number of classes, but is 10"),
        ({"classes": 0}, r"`classes` must be in \[1, V = 9\], but is 0"),
        ({"classes": 10}, r"`classes` must be in \[1, V = 9\], but is 10"),
    ],
    "rms_norm": [
        ({"offset": 2}, "`offset` must be 0 or 1, but is 2"),
    ],
    "strided_depthwise": [],
    "subsampling_stem": [
        ({"rows_per_slot": 6}, "`rows_per_slot` must be a positive multiple of 4, but is 6"),
        ({"rows_per_slot": 4}, r"`x` must have shape \(4 T, F\) = \(8, any\)"),
    ],
    "transducer_loss": [
        ({"targets": tensor([1, 2, 0])}, ".*other than the blank 0, but is 0"),
        ({"targets": tensor([1, 2, -1])}, r"`targets` must hold classes in \[0, 6\)"),
        ({"activation": "gelu"}, '`activation` must be "relu" or "tanh", but is \'gelu\''),
        ({"fastemit": -0.1}, "`fastemit` must be at least 0, but is -0.1"),
        ({"blank_id": -1}, r"`blank_id` must be in \[0, 6\), but is -1"),
        (
            {"durations": (0, 1), "weight": zeros(6, 2)},
            r"`weight` must have shape \(V \+ D, J\) = \(any, 3\)",
        ),
        (
            {"durations": (0, 1), "bias": zeros(5)},
            r"`bias` must have shape \(V \+ D,\) = \(6,\), but is \(5,\)",
        ),
        (
            {"durations": (0, 1), "targets": tensor([1, 2, 4])},
            r"`targets` must hold classes in \[0, 4\)",
        ),
        ({"durations": (0, 1), "blank_id": 4}, r"`blank_id` must be in \[0, 4\), but is 4"),
        ({"durations": (0, 1, 2, 3, 4, 5)}, "`weight` must have more rows than .* durations"),
        ({"durations": ()}, r"`durations` must increase, .*, but is \(\)"),
        ({"durations": (0,)}, r"`durations` must increase, from 0 or more to 1 or more"),
        ({"durations": (1, 0)}, r"`durations` must increase, .*, but is \(1, 0\)"),
        ({"durations": (1, 1)}, r"`durations` must increase"),
        ({"durations": (-1, 1)}, r"`durations` must increase"),
        ({"durations": (0, 1), "sigma": -0.1}, "`sigma` must be at least 0, but is -0.1"),
        ({"durations": None, "sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
    ],
    "update_running_statistics": [
        ({"running_mean": ones(6)[::2]}, "`running_mean` must be contiguous"),
        ({"momentum": 1.5}, "`momentum` must be in"),
    ],
}


# What may be another one of a valid call.
ACCEPTED = {
    "append_to_pages": {"page_table size 1"},
    "audio_windows": {"window size 0"},
    "batch_norm": {"x half", "x width"},
    "bias_activation_dropout": {"x half", "bias half"},
    "decode_attention": {"page_table size 1"},
    "dropout_add_layer_norm": {"x half", "residual half", "x_bias half"},
    "mask_features": {
        *("x half", "x width", "x size 1"),
        *("freq_shares size 2", "time_shares size 2"),
    },
    "normalize_features": {"x half", "x width", "x size 1"},
    "projected_top_k": {"hidden size 0"},
    "rms_norm": {"x dimensions", "x half", "x size 0", "weight half"},
}


def _changes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "dimensions", x[None]
    yield "dtype", x.long() if x.is_floating_point() else x.float()
    if x.is_floating_point():
        yield "half", x.half()
        yield "width", x.float() if x.dtype == torch.float64 else x.double()
    for axis in range(x.dim()):
        yield f"size {axis}", torch.cat([x, x.narrow(axis, 0, 1)], axis)


def _refusal(name: str, changed: dict[str, Any]) -> str:
    try:
        getattr(effasr_kernels, name)(**VALID[name] | changed)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", VALID)
def test_tensors_have_shapes_dtypes_and_a_device(name: str) -> None:
    """Each tensor with another size, dtype or device is refused, or the one that it must suit."""
    tensors = {key: x for key, x in VALID[name].items() if isinstance(x, Tensor)}
    accepted = set()
    for key, x in tensors.items():
        for change, changed in _changes(x):
            if message := _refusal(name, {key: changed}):
                argument = key if change == "dtype" else r"\w+"
                assert re.match(f"{name}: `{argument}` must ", message), f"{key}, {change}"
            else:
                accepted.add(f"{key} {change}")
    assert accepted == ACCEPTED.get(name, set())
    for key in [*tensors][1:]:
        message = _refusal(name, {key: tensors[key].to("meta")})
        assert re.match(rf"{name}: `\w+` must be on \w+, as `\w+` is, but is", message), key


def test_the_table_has_every_operation() -> None:
    assert set(OPERATIONS) == set(VALID) == set(MESSAGES)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [(name, *row) for name, rows in MESSAGES.items() for row in rows],
    ids=lambda x: None if isinstance(x, dict) else x[:50],
)
def test_error_messages(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        getattr(effasr_kernels, name)(**VALID[name] | changed)


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
