"""Each kernel against the reference of its operation, on the cases of a table.

`make test` runs the rows that are not ``extended``, in bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from effasr_kernels import OPERATIONS, Context
from effasr_kernels.runtime.torch_op import DifferentiableOp
from tests.gpu.conftest import DTYPES, EMULATED, SMALL_TILES
from tests.support.conformance import check_kernel, check_values
from tests.support.operation_cases import FACTORIES
from tests.support.philox import PhiloxDropout
from tests.support.tolerance import AWKWARD_LENGTHS

_RAGGED = ("empty_among_others", "all_empty", "long_among_short")
_NAMES = {lengths: name for name, lengths in AWKWARD_LENGTHS.items()}
_FLOAT32 = (torch.float32,)


@dataclass(frozen=True)
class Row:
    """A case, and what is compared.

    Attributes:
        options: Of the factory of the operation's cases.
        tail: Rows of NaN past the sequences.
        dtypes: All that the place can compute in, by default.
        patches: Values of attributes of ``effasr_kernels``, by ``module:name``.
    """

    lengths: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tail: int = 3
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
    extended: bool = False
    patches: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        lengths = _NAMES.get(self.lengths, str(self.lengths))
        return ", ".join([lengths, *(f"{key}={value}" for key, value in self.options.items())])


def _awkward(
    extended: bool = False,
    *,
    tail: int = 3,
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES),
    **options: Any,
) -> list[Row]:
    return [
        Row(lengths, options, tail, dtypes, extended=extended or name not in _RAGGED)
        for name, lengths in AWKWARD_LENGTHS.items()
    ]


_awkward_float32 = partial(_awkward, tail=6, dtypes=_FLOAT32)


def _each(
    lengths: tuple[int, ...], options: list[dict[str, Any]], pushed: int | None = None, **row: Any
) -> list[Row]:
    """A row for each of the options, of which `make test` takes the first ``pushed``."""
    return [
        Row(lengths, one, extended=pushed is not None and i >= pushed, **row)
        for i, one in enumerate(options)
    ]


def _values(name: str, *values: Any, **options: Any) -> list[dict[str, Any]]:
    return [{name: value, **options} for value in values]


def _configs(name: str, span: int) -> list[Any]:
    """Small tiles of the forward and the backward."""
    config = import_module(f"effasr_kernels.{name}._triton").Config
    return [config(span, 16, 16) if span == 8 else config(span, 16, 32, 4)] * 2


_SMALL_TILES = {f"shared.projection:{name}": value for name, value in SMALL_TILES.items()}
ACTIVATIONS = ("silu", "relu", "gelu")
MODES = ("pre-norm, bias", "post-norm", "addition", "norm")
OTHER_MODES = ("pre-norm", "post-norm, bias", "addition, bias")
CONTEXTS = (
    Context(20, 7, 16),
    Context(2, 0, 3),
    Context(70, 0, 14),
    Context(0, 0, 5),
    Context(33, 2, 1),
    Context(None, 0, 10),
    Context(7, None, 6),
)

CONTRACT: dict[str, list[Row]] = {
    "attention": [
        Row((3, 0, 18), {"causal": True, "heads": 1, "width": 16}),
        Row((3, 0, 18), {"position": "rotary", "lengths_k": (7, 1, 2), "heads": 1, "width": 16}),
        Row((2, 0, 5), {"position": "relative", "causal": True, "heads": 1, "width": 16}),
        Row((3, 0, 18), {"context": Context(1, 0, 2), "heads": 1, "width": 16}),
        Row(
            (2, 0, 5),
            {"position": "relative", "context": Context(2, 0, 3), "heads": 1, "width": 16},
        ),
        Row(
            (3, 0, 18),
            {"position": "rotary", "context": Context(2, 1, 1), "heads": 1, "width": 16},
            extended=True,
        ),
    ],
    "batch_norm": [
        *_awkward(channels=5),
        *_awkward(channels=5, silu=False, fixed=True),
    ],
    "best_alignment_loss": [
        *_awkward(),
        # Words of 32 frames, tiles of 64 tokens and channels, and a bound above all lengths.
        Row((70, 33), {"tokens": (90, 5), "width": 70}),
        Row((5, 0, 3), {"tokens": (200, 3, 0), "longest": 300}, extended=True),
    ],
    "bias_activation_dropout": _each((1, 0, 6), _values("activation", *ACTIVATIONS)),
    "ctc_loss": [
        *_awkward(),
        Row((5, 0, 11), {"blank_id": 0, "bias": False}, dtypes=_FLOAT32),
        Row((5, 0, 11), {"blank_id": 6, "dtype": torch.int32}, dtypes=_FLOAT32, extended=True),
        # With two labels to choose from, most transcripts repeat theirs, also in a row.
        Row((5, 0, 11), {"classes": 3, "blank_id": 1}, dtypes=_FLOAT32, extended=True),
        # Of equal labels as many frames are needed, and a blank between each two.
        Row((3, 4, 5, 6), {"classes": 2, "blank_id": 0, "transcripts": (3,) * 4}, dtypes=_FLOAT32),
        Row((0, 0, 3, 2, 1), {"transcripts": (0, 2, 0, 1, 0)}, dtypes=_FLOAT32),
        Row((13, 7), dtypes=_FLOAT32, patches={"shared.projection:chunk_rows": lambda _: 8}),
        Row((13, 7), {"classes": 35}, patches=_SMALL_TILES),
    ],
    "depthwise_conv": [
        *_awkward(channels=5, taps=3, gated=True),
        Row((5, 0, 11), {"channels": 5, "taps": 4, "causal": True}),
    ],
    "dropout_add_layer_norm": _each((1, 0, 6), _values("mode", *MODES, *OTHER_MODES), 4),
    "gated_activation": _each((1, 0, 6), _values("activation", "silu", "gelu", "gelu_tanh")),
    "grouped_linear": _awkward(inputs=12, outputs=20),
    "guided_attention": [
        *_awkward(heads=1, width=16),
        Row((70, 5), {"lengths_k": (33, 100), "width": 16}),
        # What float32 loses in long sums must not decide the scores.
        *(
            Row(
                (17,),
                {"lengths_k": (24,), "heads": 1, "width": width, "scale": 1 / width},
                extended=width != 36,
            )
            for width in (3, 36, 80, 256)
        ),
        *_each((33,), _values("sigma", 0.02, 1e3, lengths_k=(40,), heads=1, width=16)),
        *_each((5,), _values("scale", 0.0, -0.5, lengths_k=(9,), heads=1, width=16)),
    ],
    "linear_cross_entropy": [
        *_awkward(width=24, classes=43, label_smoothing=0.1, z_loss=0.01),
        *_each(
            (6, 0, 5),
            [
                {"width": 24, "classes": 43},
                {"width": 130, "classes": 300},
                {"width": 24, "classes": 43, "bias": False, "label_smoothing": 0.1},
                {"width": 24, "classes": 43, "bias": False, "z_loss": 0.1},
                {"width": 24, "classes": 43, "label_smoothing": 1.0},
                # Without a bias loss and gradients are zero to the bit, however logits are summed.
                {"width": 1, "classes": 1, "bias": False},
                {"width": 64, "classes": 256},
            ],
            4,
        ),
        *_each(
            (17, 33),
            [
                {"width": 7, "classes": 250, "label_smoothing": 0.1, "bias": False},
                {"width": 40, "classes": 33, "z_loss": 0.01},
                {"width": 16, "classes": 97, "label_smoothing": 0.1},
            ],
            2,
            patches=_SMALL_TILES,
        ),
        # Several chunks, the last one short; the reference knows of none.
        Row(
            (30, 9),
            {"width": 24, "classes": 43, "label_smoothing": 0.1},
            patches={"shared.projection:chunk_rows": lambda _: 16},
        ),
    ],
    "rms_norm": _each((1, 0, 6), _values("offset", 0, 1)),
    "strided_depthwise": _each((1, 0, 3), _values("relu", False, True)),
    "subsampling_stem": _each((1, 0, 3), _values("per_slot", 4, 8, channels=5)),
    "transducer_loss": [
        # The longest have few labels: the interpreter takes its time for each diagonal.
        *(
            Row(
                lengths,
                {"transcripts": (2, 3, 0, 2)[: len(lengths)]} if max(lengths) > 8 else {},
                dtypes=_FLOAT32,
                extended=name not in _RAGGED,
            )
            for name, lengths in AWKWARD_LENGTHS.items()
        ),
        Row((5, 11), {"activation": "tanh", "longest": 9}),
        *_each(
            (5, 0, 4),
            [
                {"blank_id": 0, "dtype": torch.int32, "longest": 12},
                {"blank_id": 6, "activation": "tanh", "fastemit": 0.3},
                {"classes": 3, "blank_id": 1, "fastemit": 0.1},
                {"transcripts": (0, 9, 0)},
            ],
            dtypes=_FLOAT32,
        ),
        Row(
            (3, 0, 2),
            {"transcripts": (2, 0, 1), "durations": (0, 1, 2), "sigma": 0.02, "fastemit": 0.1},
            dtypes=_FLOAT32,
        ),
    ],
}

DROPOUT = {"dropout": 0.3, "seed": 7, "offset": 5}
VALUES: dict[str, list[Row]] = {
    "attention": [
        *_awkward(causal=True, width=16),
        *_awkward(extended=True, width=16),
        *_awkward(position="relative", width=20),
        # Several tiles of queries and keys, of unequal numbers; a query before and past all keys.
        *_each(
            (38, 2),
            [
                {"position": x, "causal": causal, "lengths_k": (3, 41), "heads": 1, "width": 16}
                for x, causal in (
                    *(("none", False), ("rotary", True), ("relative", True)),
                    *(("none", True), ("rotary", False), ("relative", False)),
                )
            ],
            3,
        ),
        *_each(
            (38, 0, 2),
            _values("position", "rotary", "none", "part", causal=True, heads=6, group=3, width=16),
            1,
        ),
        Row((130, 67), {"heads": 1, "causal": True, "width": 16}),
        *_each(
            (70, 0, 5),
            _values("position", "relative", "none", "rotary", "part", tables=True, width=16),
            1,
        ),
        # Keys that no query is near, and a table that is longer than the distances.
        *_each(
            (5, 70, 0, 2, 1),
            [{"position": "relative", "lengths_k": (40, 3, 4, 0, 1), "reach": 80, "width": 20}],
        ),
        Row((1, 3), {"position": "relative", "lengths_k": (75, 0), "heads": 1, "width": 20}),
        *(
            Row(
                (3, 11),
                {"position": x, "width": width, "heads": 1},
                extended=(x, width) not in (("relative", 36), ("none", 256)),
            )
            for x in ("none", "rotary", "part", "relative")
            for width in (11, 36, 96, 256)
        ),
        *(
            Row(
                (3, 35),
                {
                    **{"position": x, "causal": x != "none", "lengths_k": (37, 20), "width": 16},
                    **{"dropout": 0.25, "seed": 7 + 2**40},
                },
                extended=x == "rotary",
                patches={"attention.reference:Dropout": PhiloxDropout},
            )
            for x in ("none", "rotary", "relative")
        ),
        # Heads of queries that share keys drop other weights.
        Row(
            (33, 2),
            {"heads": 4, "group": 2, "width": 16, "dropout": 0.25, "seed": 5},
            extended=True,
            patches={"attention.reference:Dropout": PhiloxDropout},
        ),
        # The bounds of tiles cut chunks.
        *(
            Row(
                (150, 3, 70),
                {"position": x, "context": context, "heads": 1, "width": 16},
                extended=x != "relative" or context is not CONTEXTS[0],
            )
            for x in ("none", "rotary", "part", "relative")
            for context in CONTEXTS
        ),
    ],
    "batch_norm": [
        # The last span has rows of the tail alone.
        Row((255, 0, 1, 256, 5), {"channels": 70, "wide": True}, tail=283),
        *_each((9, 3), _values("channels", 1, 260, 176, wide=True), 2, tail=1),
        Row((9, 3), {"channels": 64, "wide": True, "silu": False}, extended=True),
        Row((50, 3), {"channels": 5, "shift": 300.0}, 7, _FLOAT32),
    ],
    "bias_activation_dropout": [
        *_each((3, 2), _values("activation", *ACTIVATIONS, wide=True, **DROPOUT), 1),
        *_awkward_float32(**DROPOUT),
        *_each((3, 2), _values("channels", 1, 1_040, 6, 37, wide=True, **DROPOUT), 2),
        Row(
            (9, 0, 14),
            DROPOUT,
            6,
            _FLOAT32,
            patches={"bias_activation_dropout._triton:_PROGRAMS": 2},
        ),
        Row((3, 2), {"bias": False, **DROPOUT}, dtypes=_FLOAT32),
    ],
    "ctc_loss": [
        # The definition sums in float64; sums in float32 would be hundreds of times further off.
        Row((300, 3), {"classes": 10, "transcripts": (50, 1)}, dtypes=_FLOAT32),
        Row((6, 4), {"transcripts": (3, 1), "longest": 100}, dtypes=_FLOAT32),
    ],
    "depthwise_conv": [
        # Tiles of one sequence meet.
        Row((257, 0, 1, 128, 127, *[0] * 66), {"gated": True, "statistics": True}, tail=7),
        *_each((9, 1), _values("taps", 1, 11, 17, channels=2, gated=True), 1),
        *_each((9, 1), _values("taps", 12, 18, 32, channels=2, gated=True, causal=True), 0),
        *_each((9, 3), _values("channels", 33, 1, 32, 130, taps=3, gated=True), 1, tail=1),
        *_each((4, 7), [{"taps": 3, "bias": False, "gated": True, "causal": True}]),
        *_each((4, 7), [{"taps": 3, "bias": False}], 0),
    ],
    "dropout_add_layer_norm": [
        *(
            row
            for mode in ("pre-norm", "pre-norm, bias", *MODES[1:3], *OTHER_MODES[1:])
            for row in _awkward_float32("pre-norm" not in mode, mode=mode, **DROPOUT)
        ),
        *_awkward_float32(extended=True, mode="norm"),
        *_each(
            (3, 2), _values("channels", 260, 1, 6, 16, 37, wide=("weight", "bias"), **DROPOUT), 1
        ),
        # A wide stream beside a narrow branch.
        *_each(
            (3, 2),
            _values(
                *("mode", "pre-norm", "pre-norm, bias", *MODES[1:3], *OTHER_MODES[1:]),
                wide=("residual", "weight", "bias"),
                **DROPOUT,
            ),
            2,
        ),
        *_each((3, 2), [{"mode": "norm", "wide": ("residual", "weight", "bias")}], 0),
        *_each(
            (9, 0, 14),
            _values("mode", "pre-norm", "pre-norm, bias", *OTHER_MODES[1:], **DROPOUT),
            tail=6,
            dtypes=_FLOAT32,
            patches={"dropout_add_layer_norm._triton:_PROGRAMS": 2 * 16},
        ),
    ],
    "gated_activation": [
        *_each((5,), _values("width", 1, 1_040, 6, 37), 2),
        *_each((6,), _values("activation", "silu", "gelu", "gelu_tanh", width=24)),
    ],
    "grouped_linear": [
        # Tiles of one group meet.
        *_each((201,), _values("bias", False, True, sizes=(130, 0, 1, 70), inputs=40, outputs=24)),
        *(
            Row(
                (20,),
                {"sizes": (17, 3), "inputs": inputs, "outputs": outputs},
                extended=inputs not in (37, 65),
            )
            for inputs, outputs in ((1, 1), (37, 16), (65, 129), (96, 200))
        ),
        # Large tiles, which a GPU with few multiprocessors would choose at this size.
        Row(
            (75,),
            {"sizes": (70, 5), "inputs": 72, "outputs": 136},
            patches={"grouped_linear._triton:multiprocessors": lambda _: 1},
        ),
        # More groups than a search reads at a time.
        Row((6,), {"sizes": (3, *[0] * 130, 2, 1), "inputs": 8}, 2, _FLOAT32, extended=True),
    ],
    "guided_attention": _each(
        (17, 3, 2, 0),
        _values("seed", 1, 2**62 - 1, lengths_k=(40, 33, 0, 5), width=16, dropout=0.375),
        patches={"guided_attention.reference:Dropout": PhiloxDropout},
    ),
    "rms_norm": [
        # A row of one number is 1 or -1 whatever its size: its gradient is what rounding leaves.
        *_each((5,), _values("width", 2, 128, 5_120, 6, 37, 2_048, wide=True), 3),
        Row((5,), {"width": 24, "frozen": True}),
        # Tiles of 16 rows.
        Row(
            (70,),
            {"width": 128, "offset": 1},
            dtypes=_FLOAT32,
            patches={"rms_norm._triton:_MOST_PROGRAMS": 2},
        ),
    ],
    "strided_depthwise": [
        *_awkward_float32(nan=True),
        *(
            Row((3, 1), {"channels": channels, "bins": bins, "nan": True}, extended=channels != 37)
            for channels, bins in ((1, 2), (16, 6), (37, 10), (260, 2))
        ),
        # Spans meet, and programs take several.
        Row(
            (17, 0, 16, 5),
            {"channels": 17, "nan": True},
            dtypes=_FLOAT32,
            patches={
                "strided_depthwise._triton:configs": lambda *_: _configs("strided_depthwise", 8),
                "strided_depthwise._triton:_PROGRAMS": 2,
            },
        ),
    ],
    "subsampling_stem": [
        *_awkward_float32(per_slot=4, nan=True),
        *_awkward_float32(extended=True, nan=True)[:-1],
        *_awkward_float32(nan=True)[-1:],
        *(
            Row((3, 1), {"channels": channels, "bins": bins, "nan": True}, extended=channels != 37)
            for channels, bins in ((1, 4), (16, 12), (37, 20), (130, 4))
        ),
        *_each(
            (9, 0, 8, 5),
            _values("per_slot", 4, 8, channels=17, nan=True),
            dtypes=_FLOAT32,
            patches={
                "subsampling_stem._triton:configs": lambda *_: _configs("subsampling_stem", 16),
                "subsampling_stem._triton:_PATCH_SPAN": 16,
                "subsampling_stem._triton:_PROGRAMS": 2,
            },
        ),
    ],
    "transducer_loss": [
        Row((5, 2), {"transcripts": (2, 1), "durations": (0, 1, 2, 4), "sigma": 0.05}),
        # Without a frame only the empty transcript is possible.
        Row((0, 0, 3, 2, 1), {"transcripts": (0, 2, 0, 1, 0)}, dtypes=_FLOAT32),
        # The definition sums in float64; sums in float32 would be hundreds of times further off.
        Row((80, 3), {"transcripts": (20, 1), "classes": 10}, dtypes=_FLOAT32),
        *(
            Row(
                frames,
                {"transcripts": labels, "durations": durations, "sigma": 0.05, **options},
                dtypes=_FLOAT32,
                extended=extended,
            )
            for frames, labels, durations, options, extended in (
                ((7, 0, 5), (3, 0, 0), (0, 1, 2, 3, 4), {}, False),
                ((6, 3), (2, 4), (1, 2, 4), {"activation": "tanh", "longest": 5}, False),
                # Some of these fit no path.
                ((2, 3, 4), (0, 0, 1), (0, 3), {}, False),
                ((0, 0, 2), (0, 1, 1), (0, 1, 2), {}, False),
                ((1, 1, 1), (1, 0, 2), (1, 2), {}, True),
                ((1, 4), (0, 0), (2,), {}, True),
                ((1, 2), (3, 4), (0, 1, 4), {}, True),
                ((4, 1), (2, 1), (0, 1), {"fastemit": 0.3, "blank_id": 0}, True),
                ((9,), (2,), (0, 3, 8), {"blank_id": 6}, True),
            )
        ),
    ],
}


def _parameters(rows: dict[str, list[Row]]) -> Iterator[Any]:
    for name, row in ((name, row) for name, rows_of in rows.items() for row in rows_of):
        for dtype in (x for x in row.dtypes if x in DTYPES):
            text = f"{name}-{row.name}"[:120] + f"-{str(dtype).removeprefix('torch.')}"
            is_extended = row.extended or (len(row.dtypes) > 1 and dtype != DTYPES[-1])
            marks = [pytest.mark.extended] if is_extended else []
            yield pytest.param(name, row, dtype, id=text, marks=marks)


def _patch(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    for path, value in row.patches.items():
        module, _, attribute = path.partition(":")
        monkeypatch.setattr(import_module(f"effasr_kernels.{module}"), attribute, value)


def test_the_table_has_every_operation() -> None:
    assert {x for x, op in OPERATIONS.items() if isinstance(op, DifferentiableOp)} == set(CONTRACT)


@pytest.mark.parametrize(("name", "row", "number"), list(_parameters(CONTRACT)))
def test_contract(
    name: str, row: Row, number: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patch(monkeypatch, row)
    check_kernel(FACTORIES[name](row.lengths, **row.options), number, device)


@pytest.mark.parametrize(("name", "row", "number"), list(_parameters(VALUES)))
def test_values(
    name: str, row: Row, number: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if EMULATED and row.options.get("taps", 0) in (12, 18, 32):
        pytest.skip("long to compile: `tests/compiled` does it once, and 1, 11 and 17 run here")
    _patch(monkeypatch, row)
    check_values(FACTORIES[name](row.lengths, **row.options), number, device, tail=row.tail)
