"""One `Case` factory for each differentiable operation on packed sequences.

`tests/ops` runs the contract on them by default backends, `tests/gpu` compares kernels with the
references, `tests/compiled` compiles what they launch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels
from effasr_kernels import Context, PackedLayout, PackedSequence, RelativeBias, Rotary
from effasr_kernels.shared.ragged import wide_dtype
from tests.support.conformance import Case, CaseFor, Packed, Shared

Lengths = Sequence[int]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _exact(*shape: int) -> Tensor:
    """Random numbers that every dtype holds."""
    return torch.randn(shape).to(torch.bfloat16).to(torch.float16).double()


def _rows(lengths: Lengths, *shape: int) -> list[Tensor]:
    return [draw(n, *shape) for n in lengths]


def _case(run, packed, shared=None, **options):
    return lambda backend=None: Case(partial(_call, run, backend), packed, shared or {}, **options)


def _call(run: Callable[..., Any], backend: str | None, packed: Packed, shared: Shared) -> Any:
    return run(packed, shared, backend)


def _without_tail(x: PackedSequence) -> Tensor:
    return x.values[: x.layout.total]


def labels_for(length: int, classes: int, blank_id: int) -> Tensor:
    labels = torch.randint(classes - 1, (length,))
    return labels + (labels >= blank_id)


def ignored_targets(length: int, classes: int) -> Tensor:
    """Classes, and about a third of rows that do not count."""
    return torch.randint(classes, (length,)).masked_fill(torch.rand(length) < 0.3, -100)


def rms_norm(lengths, width=12, *, offset=0, frozen=False, wide=False):
    weight = draw(width)

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x = packed["x"]
        used = weight.to(x.values.device, wide_dtype(x.values)) if frozen else shared["weight"]
        y = effasr_kernels.rms_norm(
            _without_tail(x), used, eps=1e-5, offset=offset, backend=backend
        )
        return F.pad(y, (0, 0, 0, x.layout.rows - x.layout.total))

    return _case(
        run,
        {"x": _rows(lengths, width)},
        {} if frozen else {"weight": weight},
        results=("x",),
        rounds_inside=offset == 0,
        wide=frozenset({"weight"} if wide else ()),
    )


def gated_activation(lengths: Lengths, width: int = 12, *, activation: str = "silu") -> CaseFor:
    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        gate, up = packed["gate"], packed["up"]
        rows = _without_tail(gate), _without_tail(up)
        y = effasr_kernels.gated_activation(*rows, activation=activation, backend=backend)
        return F.pad(y, (0, 0, 0, gate.layout.rows - gate.layout.total))

    packed = {"gate": [3 * x for x in _rows(lengths, width)], "up": _rows(lengths, width)}
    return _case(run, packed, results=("gate",))


def bias_activation_dropout(
    lengths, channels=12, *, activation="silu", bias=True, wide=False, **options
):
    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x, options_ = packed["x"], {"activation": activation, "backend": backend, **options}
        return effasr_kernels.bias_activation_dropout(
            x.values, shared.get("bias"), x.layout, **options_
        )

    return _case(
        run,
        {"x": _rows(lengths, channels)},
        {"bias": draw(channels)} if bias else {},
        results=("x",),
        wide=frozenset({"bias"} if wide else ()),
    )


def batch_norm(lengths, channels=3, *, silu=True, fixed=False, wide=False, shift=0.0):
    provided = torch.linspace(-1, 1, channels), torch.linspace(0.5, 1.5, channels)

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x, layout = packed["x"].values, packed["x"].layout
        # Mean and biased variance of the real rows, 0 without one.
        real = torch.where(layout.mask()[:, None], x.detach(), 0).to(wide_dtype(x))
        count = layout.cu_seqlens[-1].clamp(min=1)
        mean = real.sum(0) / count
        away = torch.where(layout.mask()[:, None], real - mean, 0)
        statistics = mean, away.square().sum(0) / count
        if fixed:
            statistics = tuple(y.to(x.device) for y in provided)
        parameters = shared["weight"], shared["bias"]
        return effasr_kernels.batch_norm(
            x, *parameters, *statistics, layout, silu=silu, fixed=fixed, backend=backend
        )

    return _case(
        run,
        {"x": [x + shift for x in _rows(lengths, channels)]},
        {"weight": draw(channels), "bias": draw(channels)},
        results=("x",),
        mixes_sequences=not fixed,
        wide=frozenset({"weight", "bias"} if wide else ()),
    )


def dropout_add_layer_norm(lengths, mode="pre-norm", channels=12, *, wide=(), **options):
    """``mode``: pre-norm, post-norm, addition or norm; with ", bias" the branch has a bias."""
    mode, _, biased = mode.partition(", ")
    packed = {"residual": _rows(lengths, channels)}
    if mode != "norm":
        packed["x"] = _rows(lengths, channels)
    names = [] if mode == "addition" else ["weight", "bias"]
    names += ["x_bias"] if biased else []

    def run(packed: Packed, shared: Shared, backend: str | None) -> Any:
        residual, layout = packed["residual"].values, packed["residual"].layout
        results = effasr_kernels.dropout_add_layer_norm(
            packed["x"].values if "x" in packed else None,
            *(residual, shared.get("weight"), shared.get("bias"), layout),
            x_bias=shared.get("x_bias"),
            scale=0.5,
            prenorm=mode != "post-norm",
            backend=backend,
            **options,
        )
        if mode != "norm":
            return results
        # Without a branch the second result is the residual itself, with its tail.
        return results[0], torch.where(layout.mask()[:, None], results[1], 0)

    return _case(
        run,
        packed,
        {name: draw(channels) for name in names},
        results=("residual",) * (2 if mode in ("pre-norm", "norm") else 1),
        rounds_inside=mode != "addition",
        wide=frozenset(wide),
    )


def depthwise_conv(lengths, channels=3, taps=5, *, causal=False, gated=False, bias=True, **options):
    """With ``statistics`` these are computed, and not returned."""

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        y = effasr_kernels.depthwise_conv(
            *(packed["x"].values, shared["weight"], packed["x"].layout),
            bias=shared.get("bias"),
            causal=causal,
            gated=gated,
            backend=backend,
            **options,
        )
        return y[0] if options.get("statistics") else y

    shared = {"weight": draw(channels, taps)} | ({"bias": draw(channels)} if bias else {})
    packed = {"x": _rows(lengths, 2 * channels if gated else channels)}
    return _case(run, packed, shared, results=("x",))


def _real_lengths(slots: Lengths, per_slot: int) -> list[Tensor]:
    """All rows of the slots are real, all but one, all but two..."""
    return [torch.tensor([max(0, per_slot * n - i % per_slot)]) for i, n in enumerate(slots)]


def _lengths_of(packed: Packed) -> Tensor:
    # Where sequences are appended, the checks fill up with a negative number.
    return packed["length"].values[: packed["x"].layout.num_sequences].clamp(min=0)


def _with_nan(slots: list[Tensor], lengths: list[Tensor]) -> list[Tensor]:
    """NaN in the rows that are not real."""
    for x, length in zip(slots, lengths, strict=True):
        x.flatten(0, 1)[int(length) :] = torch.nan
    return slots


def strided_depthwise(slots, channels=3, bins=4, *, relu=False, nan=False):
    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x = packed["x"]
        return effasr_kernels.strided_depthwise(
            *(x.values.flatten(0, 1), *shared.values(), x.layout, _lengths_of(packed)),
            relu=relu,
            backend=backend,
        )

    x, lengths = _rows(slots, 2, bins, channels), _real_lengths(slots, 2)
    packed = {"x": _with_nan(x, lengths) if nan else x, "length": lengths}
    shared = {"weight": draw(channels, 9), "bias": draw(channels)}
    return _case(run, packed, shared, results=("x",), one_more=frozenset({"length"}))


def subsampling_stem(slots, channels=3, bins=8, *, per_slot=8, differentiable=False, nan=False):
    """Features have a gradient if ``differentiable``; the rows that are not real may be NaN."""

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x, layout = packed["x"].values, packed["x"].layout
        x = x if differentiable else x.detach()
        y = effasr_kernels.subsampling_stem(
            *(x.flatten(0, 1), *shared.values(), layout, _lengths_of(packed)),
            rows_per_slot=per_slot,
            backend=backend,
        )
        return y.view(layout.rows, per_slot // 4 * bins // 4, channels)

    x, lengths = _rows(slots, per_slot, bins), _real_lengths(slots, per_slot)
    packed = {"x": _with_nan(x, lengths) if nan else x, "length": lengths}
    names = "weight", "bias", "depthwise_weight", "depthwise_bias"
    shared = {n: draw(channels, 9) if "weight" in n else draw(channels) for n in names}
    return _case(run, packed, shared, results=("x",), one_more=frozenset({"length"}))


def grouped_linear(lengths, inputs=4, outputs=5, *, sizes=None, bias=True):
    """Rows are sorted by their group, of random ``sizes`` or these, and behind all is the tail."""
    groups = 3 if sizes is None else len(sizes)

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x, group = packed["x"].values, packed["group"].values
        group = torch.where(group < 0, groups, group)
        order = group.argsort(stable=True)
        offsets = torch.searchsorted(group[order], torch.arange(groups + 1, device=x.device))
        layout = PackedLayout.from_offsets(offsets.int(), x.shape[0])
        y = effasr_kernels.grouped_linear(
            x[order], shared["weight"], layout, bias=shared.get("bias"), backend=backend
        )
        return y[order.argsort()]

    group = torch.randint(groups, (sum(lengths),))
    if sizes is not None:
        group = torch.arange(groups).repeat_interleave(torch.tensor(sizes))
    packed = {"x": _rows(lengths, inputs), "group": group.split(list(lengths))}
    shared = {"weight": draw(groups, outputs, inputs) / inputs**0.5}
    shared |= {"bias": draw(groups, outputs)} if bias else {}
    return _case(run, packed, shared, results=("x",))


def linear_cross_entropy(lengths, width=4, classes=6, *, bias=True, **options):
    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        hidden, targets = packed["hidden"].values, packed["targets"].values
        options_ = {"bias": shared.get("bias"), "backend": backend, **options}
        return effasr_kernels.linear_cross_entropy(hidden, shared["weight"], targets, **options_)

    packed = {
        "hidden": _rows(lengths, width),
        "targets": [ignored_targets(n, classes) for n in lengths],
    }
    shared = {"weight": draw(classes, width) / width**0.5} | (
        {"bias": draw(classes)} if bias else {}
    )
    return _case(run, packed, shared, results=("hidden",))


def _transcripts(frames: Lengths, lengths: Lengths | None) -> list[int]:
    """A third of each length; the last does not fit if it can be."""
    if lengths is not None:
        return list(lengths)
    thirds = [(n + 2) // 3 for n in frames]
    return [*thirds[:-1], frames[-1] + 1 if 0 < frames[-1] < 8 else thirds[-1]]


def _bounded(layout: PackedLayout, longest: int | None) -> PackedLayout:
    return PackedLayout(layout.cu_seqlens, layout.cu_seqlens_host, layout.rows, longest)


def ctc_loss(
    frames: Lengths,
    transcripts: Lengths | None = None,
    *,
    blank_id: int = 4,
    classes: int = 7,
    width: int = 20,
    bias: bool = True,
    dtype: torch.dtype = torch.int64,
    longest: int | None = None,
) -> CaseFor:
    """The last transcript is infeasible if it has few frames."""

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        hidden, targets = packed["hidden"], packed["targets"]
        return effasr_kernels.ctc_loss(
            *(hidden.values, shared["weight"], targets.values),
            *(hidden.layout, _bounded(targets.layout, longest)),
            bias=shared.get("bias"),
            blank_id=blank_id,
            backend=backend,
        )

    labels = [labels_for(n, classes, blank_id) for n in _transcripts(frames, transcripts)]
    packed = {"hidden": _rows(frames, width), "targets": [x.to(dtype) for x in labels]}
    shared = {"weight": draw(classes, width) / 4} | ({"bias": draw(classes)} if bias else {})
    return _case(run, packed, shared)


def best_alignment_loss(frames, tokens=None, *, width=20, longest=None) -> CaseFor:
    """The last sequence has no tokens."""

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        x, y = packed["speech"], packed["text"]
        layouts = x.layout, _bounded(y.layout, longest)
        return effasr_kernels.best_alignment_loss(x.values, y.values, *layouts, backend=backend)

    tokens = [*((n + 2) // 2 for n in frames[:-1]), 0] if tokens is None else tokens
    return _case(run, {"speech": _rows(frames, width), "text": _rows(tokens, width)})


def transducer_loss(
    frames: Lengths,
    transcripts: Lengths | None = None,
    *,
    blank_id: int = 2,
    classes: int = 7,
    width: int = 20,
    durations: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.int64,
    longest: int | None = None,
    **options: Any,
) -> CaseFor:
    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        encoded, targets = packed["encoded"], packed["targets"]
        settings = {"blank_id": blank_id, "durations": durations, "backend": backend}
        return effasr_kernels.transducer_loss(
            *(encoded.values, packed["predicted"].values, targets.values),
            *(encoded.layout, _bounded(targets.layout, longest)),
            *(shared["weight"], shared["bias"]),
            **{"activation": "relu"} | settings | options,
        )

    labels = [labels_for(n, classes, blank_id) for n in _transcripts(frames, transcripts)]
    rows = classes + len(durations or ())
    return _case(
        run,
        {
            "encoded": _rows(frames, width),
            "predicted": _rows([len(y) + 1 for y in labels], width),
            "targets": [y.to(dtype) for y in labels],
        },
        {"weight": draw(rows, width) / 4, "bias": draw(rows)},
        one_more=frozenset({"predicted"}),
        has_true_gradient=not options.get("fastemit"),
        rounds_inside=True,
    )


def position_for(kind: str, shared: Shared) -> Rotary | RelativeBias | None:
    """``kind``: none, rotary, part (of the channels) or relative."""
    if kind == "relative":
        return RelativeBias(shared["content_bias"], shared["position_bias"], shared["table"])
    return {"rotary": Rotary(100.0), "part": Rotary(100.0, 0.5)}.get(kind)


def attention(
    lengths: Lengths,
    position: str = "none",
    *,
    lengths_k: Lengths | None = None,
    heads: int = 2,
    group: int = 1,
    width: int = 4,
    context: Context | None = None,
    longest: int | None = None,
    reach: int | None = None,
    tables: bool = False,
    **options: Any,
) -> CaseFor:
    options = {"scale": 0.7 * width**-0.5} | options
    reach = max([*lengths, *(lengths_k or ()), longest or 1]) if reach is None else reach
    if context is not None:
        reach = min(reach, context.reach)
    keys = lengths if lengths_k is None else lengths_k

    def run(packed: Packed, shared: Shared, backend: str | None) -> Tensor:
        q, k, v = (packed[name] for name in "qkv")
        layout = q.layout if longest is None else _bounded(q.layout, longest)
        layouts = layout, layout if lengths_k is None else k.layout
        return effasr_kernels.attention(
            *(q.values, k.values, v.values, *(_tabled(*layouts) if tables else layouts)),
            position=position_for(position, shared),
            context=context,
            backend=backend,
            **options,
        )

    packed = {"q": [_exact(n, heads, width) for n in lengths]}
    packed |= {name: [_exact(n, heads // group, width) for n in keys] for name in "kv"}
    shared = {}
    if position == "relative":
        shared = {name: _exact(heads, width) for name in ("content_bias", "position_bias")}
        shared["table"] = _exact(2 * max(reach, 1) - 1, heads, width)
    return _case(run, packed, shared, results=("q",))


def _tabled(layout_q: PackedLayout, layout_k: PackedLayout) -> tuple[PackedLayout, PackedLayout]:
    tabled = layout_q.with_tile_tables()
    return tabled, tabled if layout_k is layout_q else layout_k.with_tile_tables()


def guided_attention(
    lengths, lengths_k=None, *, heads=2, width=4, sigma=0.3, tables=False, **options
):
    def run(packed: Packed, shared: Shared, backend: str | None) -> tuple[Tensor, Tensor]:
        q, k, v = (packed[name] for name in "qkv")
        layouts = q.layout, k.layout
        return effasr_kernels.guided_attention(
            *(q.values, k.values, v.values, *(_tabled(*layouts) if tables else layouts)),
            sigma=sigma,
            backend=backend,
            **options,
        )

    keys = lengths[::-1] if lengths_k is None else lengths_k
    packed = {"q": _rows(lengths, heads, width)}
    packed |= {name: _rows(keys, heads, width) for name in "kv"}
    return _case(run, packed, results=("q", "q"))


FACTORIES: dict[str, Callable[..., CaseFor]] = {
    factory.__name__: factory
    for factory in (
        *(attention, batch_norm, best_alignment_loss, bias_activation_dropout, ctc_loss),
        *(depthwise_conv,),
        *(dropout_add_layer_norm, gated_activation, grouped_linear, guided_attention),
        *(linear_cross_entropy, rms_norm, strided_depthwise, subsampling_stem, transducer_loss),
    )
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "attention": [
        *({"position": x} for x in ("none", "part", "relative")),
        *({"position": x, "causal": True} for x in ("none", "part", "relative")),
        *({"position": x, "lengths_k": "reversed"} for x in ("none", "part", "relative")),
        *({"position": x, "context": Context(2, 0, 3)} for x in ("none", "rotary", "relative")),
        *({"position": x, "context": Context(1, 2, 1)} for x in ("none", "rotary", "relative")),
    ],
    "batch_norm": [{}, {"silu": False}, {"fixed": True}],
    "best_alignment_loss": [{"width": 3}],
    "bias_activation_dropout": [
        *({"activation": x} for x in ("silu", "relu", "gelu")),
        {"bias": False},
    ],
    "ctc_loss": [{"classes": 5, "width": 3, "blank_id": x} for x in (0, 4)],
    "depthwise_conv": [{}, {"taps": 4, "causal": True, "gated": True}, {"taps": 1}],
    "dropout_add_layer_norm": [
        {"mode": x} for x in ("pre-norm", "post-norm, bias", "addition", "norm")
    ],
    "gated_activation": [{"activation": x} for x in ("silu", "gelu", "gelu_tanh")],
    "grouped_linear": [{}, {"bias": False}],
    "guided_attention": [{"width": 3}],
    "linear_cross_entropy": [{"label_smoothing": 0.1, "z_loss": 0.01}],
    "rms_norm": [{"offset": 0}, {"offset": 1}],
    "strided_depthwise": [{}, {"relu": True}],
    "subsampling_stem": [{"per_slot": x, "differentiable": True} for x in (4, 8)],
    "transducer_loss": [
        {"classes": 5, "width": 3, **settings}
        for settings in (
            {"activation": "tanh"},
            {},
            {"fastemit": 0.1},
            {"durations": (0, 1, 2, 3, 4), "sigma": 0.05},
            {"durations": (1, 3), "fastemit": 0.1, "activation": "tanh"},
        )
    ],
}
"""What the contract is checked for, and each formula."""
