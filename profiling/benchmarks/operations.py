"""Cases of operations other than attention and the transducer's loss, with their peers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from benchmarks.contender import (
    Case,
    Contender,
    Form,
    Padding,
    Peer,
    case_of,
    leaf,
    without_tail,
)
from benchmarks.workload import Workload
from effasr_kernels import PackedLayout

_EXPANSION = 4


def _torch(workload: Workload, call: Callable[..., Any]) -> dict[str, Peer]:
    """Return a call of PyTorch as it is and compiled; eager twice without a GPU."""
    on_gpu = workload.device.type == "cuda"
    compiled = lambda: torch.compile(call, dynamic=False) if on_gpu else call
    return {"torch eager": lambda: call, "torch.compile": compiled}


# --- losses ---------------------------------------------------------------------------------------


def losses(workload: Workload) -> list[Case]:
    """Cross-entropy of the decoder, first at the size of speech models, and CTC of the encoder."""
    return [
        cross_entropy(workload, 0.0, of_speech=True),
        cross_entropy(workload, 0.1),
        cross_entropy(workload, 0.0),
        _ctc(workload),
        _best_alignment(workload),
    ]


def cross_entropy(workload: Workload, smoothing: float, *, of_speech: bool = False) -> Case:
    """Return losses that sum over tokens; rows past the last token are ignored.

    With `of_speech` it has the size of a micro-batch of Canary flash: few tokens and few classes,
    so that all logits fit in memory and eager computes them once.
    """
    classes, tokens = workload.widths.vocabulary, workload.tokens
    if of_speech:
        classes, tokens = workload.widths.speech_classes, min(tokens, workload.widths.speech_tokens)
    hidden = workload.draw(tokens, workload.width)
    weight = workload.draw(classes, workload.width, scale=workload.width**-0.5)
    targets = workload.labels(classes)[:tokens]
    targets[workload.token_layout.total :] = -100
    smoothed: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}

    def eager() -> Any:
        return lambda h, w: F.cross_entropy(F.linear(h, w).float(), targets, **smoothed)

    def chunked() -> Any:
        if not hasattr(F, "linear_cross_entropy"):
            raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
        # With smoothing it warns, and computes all logits.
        options = smoothed | {"options": torch.nn.LinearCrossEntropyOptions()}  # type: ignore[attr-defined]
        return lambda h, w: F.linear_cross_entropy(h, w, targets, **options).float()  # type: ignore[attr-defined]

    def liger() -> Any:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyLoss,
        )

        loss = LigerFusedLinearCrossEntropyLoss(**smoothed)
        return lambda h, w: loss(w, h, targets).float()

    def cut() -> Any:
        from cut_cross_entropy import (  # pyright: ignore[reportMissingImports]
            linear_cross_entropy,
        )

        # What it leaves out by default is small once a model has learnt, and here nearly all.
        options = {"reduction": "sum", "filter_eps": None}
        return lambda h, w: linear_cross_entropy(h, w, targets, **options).float()

    arguments = {"hidden": hidden, "weight": weight, "targets": targets}
    # As the model does where it trains; the other sizes measure the general case.
    arguments |= {"label_smoothing": smoothing, "uniform_gradient": of_speech}
    peers: dict[str, Peer] = {"torch eager": eager, "Liger": liger}
    if not smoothing:
        peers |= {"torch chunked": chunked, "cut-cross-entropy": cut}
    kind = f"smoothing {smoothing:g}" if smoothing else "speech" if of_speech else ""
    shape = f"U={tokens} C={workload.width} V={classes}"
    # The gradient of a mean over tokens, but for its scale.
    ones, total = [torch.ones((), device=hidden.device)], lambda losses: losses.sum().float()
    return case_of("linear_cross_entropy", kind, shape, arguments, ones, peers, select=total)


def _ctc(workload: Workload) -> Case:
    """Return a loss for each utterance; the blank is the last class."""
    blank = workload.widths.vocabulary
    frames, tokens = workload.frame_layout, workload.token_layout
    hidden = workload.rows_of(frames, workload.width)
    weight = workload.draw(blank + 1, workload.width, scale=workload.width**-0.5)
    targets = workload.labels(blank)
    upstream = torch.ones(frames.num_sequences, device=hidden.device)

    def padded() -> Any:
        padding = Padding(frames)
        # Lengths on the host: torch would otherwise wait for them.
        counts = padding.lengths.cpu(), torch.tensor([tokens.lengths[n] for n in padding.nonempty])
        nonempty = torch.tensor(padding.nonempty, device=hidden.device)
        labels = targets[: tokens.total]

        def call(hidden: Tensor, weight: Tensor) -> Tensor:
            scores = F.linear(hidden, weight).float().log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(scores, labels, *counts, blank, reduction="none")

        def whole(losses: Tensor) -> Tensor:
            return losses.new_zeros(frames.num_sequences).index_copy_(0, nonempty, losses)

        return call, {"hidden": padding.form(0, 1, 2), "result 0": (lambda x: x[nonempty], whole)}

    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "blank_id": blank}
    arguments |= {"layout_frames": frames, "layout_targets": tokens}
    shape = f"{workload.describe()} C={workload.width} V={blank + 1}"
    return case_of("ctc_loss", "", shape, arguments, [upstream], {"torch ctc_loss padded": padded})


def _best_alignment(workload: Workload) -> Case:
    frames, tokens = workload.frame_layout, workload.token_layout
    rows = {"speech": workload.rows_of(frames, workload.width)}
    rows |= {"text": workload.rows_of(tokens, workload.width)}
    upstream = torch.ones(frames.num_sequences, device=rows["text"].device)
    arguments = {**rows, "layout_speech": frames, "layout_text": tokens}
    shape = f"{workload.describe()} C={workload.width}"
    return case_of("best_alignment_loss", "", shape, arguments, [upstream], {})


# --- convolutions ---------------------------------------------------------------------------------

_TAPS = 9
_SQUARE: Form = (lambda w: w.view(-1, 1, 3, 3), lambda w: w.flatten(1))


def convolutions(workload: Workload) -> list[Case]:
    """A Conformer's convolution, alone and as in training, and the subsampling."""
    return [_depthwise(workload), _gated_depthwise(workload), _stem(workload), _strided(workload)]


def _conv1d(workload: Workload) -> tuple[Callable[..., Tensor], dict[str, Form]]:
    """Return cuDNN's convolution of padded rows (B, C, T) by taps (C, 1, K), and these forms."""
    rows = Padding(workload.frame_layout).form(0, 2, 1)
    options = {"padding": _TAPS // 2, "groups": workload.width}
    forms = {"x": rows, "result 0": rows, "weight": (lambda w: w[:, None], lambda w: w[:, 0])}
    return lambda x, weight: F.conv1d(x, weight, **options), forms


def _depthwise(workload: Workload) -> Case:
    layout, width = workload.frame_layout, workload.width
    x = workload.rows_of(layout, width)
    arguments = {"x": x, "weight": workload.draw(width, _TAPS), "layout": layout}
    shape = f"{workload.describe()} C={width} K={_TAPS}"
    upstream, peers = [x.detach().roll(1, 1)], {"torch conv1d padded": lambda: _conv1d(workload)}
    return case_of("depthwise_conv", "", shape, arguments, upstream, peers)


def _gated_depthwise(workload: Workload) -> Case:
    """With the gate before it, and mean and variance for batch norm after it, without gradients."""
    layout, width = workload.frame_layout, workload.width
    x, weight = workload.rows_of(layout, 2 * width), workload.draw(width, _TAPS)

    def cudnn() -> Any:
        padding = Padding(layout)
        inside, frames = padding.mask[:, None], padding.lengths.sum()
        convolve, forms = _conv1d(workload)

        def call(x: Tensor, weight: Tensor) -> Tensor:
            y = convolve(F.glu(x, 1), weight)
            with torch.no_grad():
                counted = y.float() * inside
                mean = counted.sum((0, 2)) / frames
                counted.square().sum((0, 2)) / frames - mean.square()
            return y

        return call, forms

    arguments = {"x": x, "weight": weight, "layout": layout, "gated": True, "statistics": True}
    shape = f"{workload.describe()} C={width} K={_TAPS}"
    grads, peers = [workload.rows_of(layout, width).detach()], {"torch conv1d padded": cudnn}
    first = lambda results: results[0]
    return case_of("depthwise_conv", "gated", shape, arguments, grads, peers, select=first)


def _utterance_lengths(layout: PackedLayout, factor: int) -> Tensor:
    """Return the input rows of each utterance, a few less than its share."""
    lengths = torch.tensor(layout.lengths, device=layout.device) * factor
    return (lengths - factor // 2).clamp_min(0)


def _filters(workload: Workload) -> dict[str, Tensor]:
    """Return taps (C, 9) and biases (C,)."""
    channels = workload.widths.channels
    weight = workload.draw(channels, _TAPS, scale=1 / 3)
    return {"weight": weight, "bias": workload.draw(channels)}


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups = len(weight) if x.shape[1] > 1 else 1
    return F.conv2d(x, weight, bias, stride=2, padding=1, groups=groups)


def _within(x: Tensor, counts: Tensor, stride: int = 1) -> Tensor:
    """Return (B, C, T, F) with zeros past the end of each utterance."""
    places = torch.arange(x.shape[2], device=x.device) * stride
    return x * (places < counts[:, None])[:, None, :, None]


def _stem(workload: Workload) -> Case:
    """Quartering of time and frequency; features get no gradient."""
    layout, mels, channels = workload.frame_layout, workload.widths.mels, workload.widths.channels
    x, lengths = workload.rows_of(layout.scaled(8), mels).detach(), _utterance_lengths(layout, 8)
    filters = _filters(workload)
    filters |= {f"depthwise_{name}": leaf(y.flip(0)) for name, y in filters.items()}
    upstream = workload.rows_of(layout.scaled(2), mels // 4, channels).detach()

    def conv2d() -> Any:
        wide = Padding(layout.scaled(8))
        counts = lengths[torch.tensor(wide.nonempty, device=lengths.device)]
        features = _within(wide.pad(x)[:, None], counts)

        def call(*filters: Tensor) -> Tensor:
            z = _within(_conv2d(features, *filters[:2]).relu(), counts, 2)
            return _within(_conv2d(z, *filters[2:]), counts, 4)

        rows = Padding(layout.scaled(2)).form(0, 3, 1, 2)
        return call, {"weight": _SQUARE, "depthwise_weight": _SQUARE, "result 0": rows}

    arguments = {"x": x, **filters, "layout": layout, "lengths": lengths}
    shape, peers = f"{workload.describe()} C={channels} F={mels}", {"torch conv2d padded": conv2d}
    return case_of("subsampling_stem", "", shape, arguments, [upstream], peers)


def _strided(workload: Workload) -> Case:
    layout, bands = workload.frame_layout, workload.widths.mels // 4
    channels, lengths = workload.widths.channels, _utterance_lengths(layout, 2)
    x = workload.rows_of(layout.scaled(2), bands, channels)

    def conv2d() -> Any:
        wide, rows = Padding(layout.scaled(2)), Padding(layout)
        counts = lengths[torch.tensor(wide.nonempty, device=lengths.device)]
        call = lambda x, *filters: _within(_conv2d(_within(x, counts), *filters), counts, 2)
        order = (0, 3, 1, 2)
        return call, {"x": wide.form(*order), "weight": _SQUARE, "result 0": rows.form(*order)}

    arguments = {"x": x, **_filters(workload), "layout": layout, "lengths": lengths}
    shape, peers = f"{workload.describe()} C={channels} F={bands}", {"torch conv2d padded": conv2d}
    upstream = [workload.rows_of(layout, bands // 2, channels).detach()]
    return case_of("strided_depthwise", "", shape, arguments, upstream, peers)


# --- between the matrix products ------------------------------------------------------------------


def between(workload: Workload, *, dropout: float = 0.1) -> list[Case]:
    """The residual stream with its norm, and the inside of a feed-forward network.

    Peers drop other elements than ours, so that their results can be compared only without dropout.
    """
    return [_residual(workload, dropout), _activation(workload, dropout)]


def _residual(workload: Workload, dropout: float) -> Case:
    """Dropout, addition to a float32 stream, and LayerNorm in the dtype of the branch."""
    layout, width = workload.frame_layout, workload.width
    x = workload.rows_of(layout, width)
    stream = leaf(workload.rows_of(layout, width).float())
    weight, bias = (leaf(workload.draw(width).float()) for _ in range(2))
    arguments = {"x": x, "residual": stream, "weight": weight, "bias": bias, "layout": layout}

    def call(x: Tensor, stream: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        added = stream + F.dropout(x, dropout)
        return F.layer_norm(added, (width,), weight, bias).to(x.dtype), added

    peers = _torch(workload, call)
    arguments |= {"dropout": dropout, "seed": 0}
    grads = [x.detach().roll(1, 1), stream.detach().roll(1, 1)]
    shape, exact = f"{workload.describe()} C={width}", not dropout
    return case_of("dropout_add_layer_norm", "", shape, arguments, grads, peers, exact=exact)


def _activation(workload: Workload, dropout: float) -> Case:
    layout, width = workload.frame_layout, _EXPANSION * workload.width
    x, bias = workload.rows_of(layout, width), leaf(workload.draw(width).float())
    peers = _torch(workload, lambda x, bias: F.dropout(F.silu(x + bias.to(x.dtype)), dropout))
    arguments = {"x": x, "bias": bias, "layout": layout, "activation": "silu"}
    arguments |= {"dropout": dropout, "seed": 0}
    grads, shape = [x.detach().roll(1, 1)], f"{workload.describe()} C={width}"
    name, exact = "bias_activation_dropout", not dropout
    return case_of(name, "silu", shape, arguments, grads, peers, exact=exact)


def norms(workload: Workload) -> list[Case]:
    return [batch_norm(workload), _running_statistics(workload)]


def batch_norm(workload: Workload) -> Case:
    """Ours gets the statistics, which the convolution before it computes; torch computes them."""
    layout, width = workload.frame_layout, workload.width
    x, rows = workload.rows_of(layout, width), without_tail(layout)
    weight, bias = (leaf(workload.draw(width).float().roll(i)) for i in (1, 2))

    def call(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.batch_norm(rows, None, None, weight, bias, training=True))

    forms = {"x": rows, "result 0": rows}
    made = _torch(workload, call)
    peers = {name: lambda make=make: (make(), forms) for name, make in made.items()}
    arguments = {"x": x, "weight": weight, "bias": bias, "layout": layout, "silu": True}
    arguments |= _statistics(x, layout.total)
    grads = [workload.rows_of(layout, width).detach().roll(1, 1)]
    shape = f"{workload.describe()} C={width}"
    return case_of("batch_norm", "silu", shape, arguments, grads, peers)


def _running_statistics(workload: Workload) -> Case:
    """With momentum 1 repetitions change nothing."""
    layout, width = workload.frame_layout, workload.width
    leaves = _statistics(workload.rows_of(layout, width), layout.total)
    mean, variance = leaves.values()

    def contender(update: Callable[..., object]) -> Contender:
        state = torch.zeros_like(mean), torch.ones_like(mean)
        batches = torch.zeros((), dtype=torch.int64, device=mean.device)

        def call() -> tuple[Tensor, Tensor]:
            update(*state, batches)
            return state

        return Contender(leaves, call, moved=6 * mean.numel() * mean.element_size())

    def ours(backend: str) -> Contender:
        update, options = kernels.update_running_statistics, {"momentum": 1.0, "backend": backend}
        return contender(lambda *state: update(*state, mean, variance, layout, **options))

    def eager(old_mean: Tensor, old_variance: Tensor, batches: Tensor) -> None:
        count = layout.cu_seqlens[-1].float()
        share = 1.0 * (count > 0)
        old_mean.lerp_(mean, share)
        old_variance.lerp_(variance * (count / (count - 1).clamp(min=1)), share)
        batches.add_(1)

    shape, peers = f"N={len(layout.lengths)} C={width}", {"torch eager": lambda: contender(eager)}
    return Case("update_running_statistics", "", shape, ours, peers)


def _statistics(x: Tensor, total: int) -> dict[str, Tensor]:
    real = x.detach()[:total].float()
    return {"mean": real.mean(0), "variance": real.var(0, correction=0)}


def language_model(workload: Workload) -> list[Case]:
    """RMS norm and the inside of a gated feed-forward network, as in a Qwen3 of 1.7 B weights."""
    return [_rms_norm(workload), _gated_activation(workload)]


def _rms_norm(workload: Workload) -> Case:
    """Llama's, whose row is rounded before it is multiplied by the weight."""
    width, eps = 2 * workload.width, 1e-6
    x, weight = workload.draw(workload.rows, width), leaf(workload.draw(width).roll(1))

    def call(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normal.to(x.dtype)

    def liger() -> Any:
        from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
            LigerRMSNormFunction,
        )

        # In place it would write the gradient over that of the result, which is used again here.
        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)

    arguments, shape = {"x": x, "weight": weight, "eps": eps}, f"{workload.describe()} W={width}"
    grads, peers = [x.detach().roll(1, 1)], _torch(workload, call) | {"Liger": liger}
    return case_of("rms_norm", "llama", shape, arguments, grads, peers)


def _gated_activation(workload: Workload) -> Case:
    """Without Liger's function, whose backward writes over the gates and values."""
    width = 2 * workload.width * 3
    gate = workload.draw(workload.rows, width)
    arguments = {"gate": gate, "up": leaf(workload.draw(workload.rows, width).roll(1))}
    grads, shape = [gate.detach().roll(1, 1)], f"{workload.describe()} W={width}"
    peers = _torch(workload, lambda gate, up: F.silu(gate) * up)
    arguments["activation"] = "silu"
    return case_of("gated_activation", "silu", shape, arguments, grads, peers)


def grouped(workload: Workload) -> list[Case]:
    """An expert's first layer: groups of unequal size, one of them empty."""
    frames, width, groups = workload.frame_layout, workload.width, 4
    sizes = (frames.total // 2, 0, frames.total // 8)
    sizes = (*sizes, frames.total - sum(sizes))
    layout = PackedLayout.from_lengths(sizes, workload.device, rows=frames.rows)
    wide = _EXPANSION * width
    weight = workload.draw(groups, wide, width, scale=width**-0.5)

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        # The host knows the sizes, which it does not where a router chooses.
        *rows, tail = x.split([*layout.lengths, layout.rows - layout.total])
        products = [F.linear(x, w) for x, w in zip(rows, weight, strict=True)]
        return torch.cat([*products, tail.new_zeros(len(tail), wide)])

    def grouped_mm(x: Tensor, weight: Tensor) -> Tensor:
        # For bfloat16 on a GPU; what it leaves in the tail is overwritten.
        product = F.grouped_mm(x, weight.transpose(1, 2), offs=layout.cu_seqlens[1:])
        return torch.where(layout.mask()[:, None], product, 0)

    peers: dict[str, Peer] = {"torch loop": lambda: loop, "torch grouped_mm": lambda: grouped_mm}
    arguments = {"x": workload.rows_of(layout, width), "weight": weight, "layout": layout}
    grads = [workload.rows_of(layout, wide).detach()]
    shape = f"{workload.describe()} G={groups} C={width} F={wide}"
    return [case_of("grouped_linear", "", shape, arguments, grads, peers)]


# --- a decoding step ------------------------------------------------------------------------------

_SEQUENCES, _HYPOTHESES, _PAGE = 32, 5, 64
_GROUP = 2  # heads that share keys in Qwen3 of 1.7 billion weights, of 16 with 128 channels


def decoding(workload: Workload) -> list[Case]:
    """A token of each hypothesis: of one, for one sequence and many, and of a beam."""
    frames, tokens = (lengths[:_SEQUENCES] for lengths in workload.lengths)
    both = [f + t for f, t in zip(frames, tokens, strict=True)]
    return [
        _cross(workload, frames[:1], 1, "cross, one sequence"),
        _cross(workload, frames, 1, "cross"),
        _cross(workload, frames, _HYPOTHESES, "cross, beam"),
        _self(workload, tokens, 1, "self"),
        _self(workload, both, _GROUP, "self, grouped"),
        _append(workload, tokens),
        _top_k(workload, len(frames), 1, ""),
        _top_k(workload, len(frames) * _HYPOTHESES, 2 * _HYPOTHESES, "beam"),
    ]


class _Cache:
    """Keys and values of some sequences: padded (S, H, longest, D), and in pages (P, B, H, D)."""

    def __init__(self, workload: Workload, lengths: list[int]):
        device, self.heads, self.width = workload.device, workload.widths.heads, workload.head_width
        columns = -(-max(lengths) // _PAGE)
        count = len(lengths) * columns
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.table = order.view(len(lengths), columns).int()
        self.pages, self.padded = [], []
        for seed in (1, 2):
            pages = workload.draw(count, _PAGE, self.heads, self.width).detach().roll(seed, -1)
            rows = pages[order].view(len(lengths), columns * _PAGE, self.heads, self.width)
            self.pages.append(pages)
            self.padded.append(rows[:, : max(lengths)].transpose(1, 2).contiguous())
        column = torch.arange(max(lengths), device=device)
        self.mask = (column < self.lengths[:, None])[:, None, None]  # where there is a key
        self.moved = 2 * sum(lengths) * self.heads * self.width * self.pages[0].element_size()
        self.arguments = {"page_table": self.table, "lengths": self.lengths}
        self.arguments |= dict(zip(("k_pages", "v_pages"), self.pages, strict=True))


def _cross(workload: Workload, lengths: list[int], hypotheses: int, kind: str) -> Case:
    """The hypotheses of each sequence attend to its encoded speech."""
    cache = _Cache(workload, lengths)
    q = workload.draw(len(lengths) * hypotheses, cache.heads, cache.width).detach()
    shape = len(lengths), hypotheses, cache.heads, cache.width
    back = lambda x: x.transpose(1, 2).reshape(q.shape)
    form = lambda q: q.view(shape).transpose(1, 2), back

    def padded() -> Any:
        attend = F.scaled_dot_product_attention
        call = lambda q: attend(q, *cache.padded, attn_mask=cache.mask)
        return call, {"q": form, "result 0": form}

    text = f"S={len(lengths)} N={len(q)} keys={sum(lengths)} longest={max(lengths)}"
    text += f" H={cache.heads} D={cache.width} B={_PAGE}"
    moved = cache.moved + 2 * q.numel() * q.element_size()
    arguments, peers = {"q": q, **cache.arguments}, {"torch SDPA padded": padded}
    options: dict[str, Any] = {"leaves": {"q": q}, "moved": moved}
    return case_of("decode_attention", kind, text, arguments, (), peers, **options)


def _self(workload: Workload, lengths: list[int], group: int, kind: str) -> Case:
    """The newest token of each sequence enters the cache, and attends to all so far."""
    cache = _Cache(workload, lengths)
    q = workload.draw(len(lengths), group * cache.heads, cache.width).detach()
    new = workload.draw(len(lengths), cache.heads, cache.width).detach()
    new_k, new_v = (new.roll(i, -1) for i in (1, 2))

    def padded() -> Any:
        rows, last = torch.arange(len(lengths), device=q.device), cache.lengths.long() - 1
        options = {"attn_mask": cache.mask, **({"enable_gqa": True} if group > 1 else {})}

        def call(q: Tensor) -> Tensor:
            for x, newest in zip(cache.padded, (new_k, new_v), strict=True):
                x[rows, :, last] = newest
            return F.scaled_dot_product_attention(q[:, :, None], *cache.padded, **options)[:, :, 0]

        return call

    text = f"S=N={len(lengths)} keys={sum(lengths)} longest={max(lengths)} H={group * cache.heads}"
    text += f" Hk={cache.heads}" if group > 1 else ""
    text += f" D={cache.width} B={_PAGE}"
    moved = cache.moved + (2 * q.numel() + 2 * new.numel()) * q.element_size()
    arguments = {"q": q, **cache.arguments, "new_k": new_k, "new_v": new_v}
    options: dict[str, Any] = {"leaves": {"q": q}, "moved": moved}
    peers = {"torch SDPA padded": padded}
    return case_of("decode_attention", kind, text, arguments, (), peers, **options)


def _append(workload: Workload, lengths: list[int]) -> Case:
    """Keys and values of all tokens of some prompts enter the cache."""
    cache, device = _Cache(workload, lengths), workload.device
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).int().to(device)
    table = cache.table[sequence.to(device)]
    rows = workload.draw(sum(lengths), cache.heads, cache.width).detach()
    leaves = {"k": rows.roll(1, -1), "v": rows.roll(2, -1)}

    def index_put() -> Any:
        pages = [x.clone() for x in cache.pages]
        page = table.gather(1, (positions // _PAGE).long()[:, None])[:, 0].long()
        row = (positions % _PAGE).long()

        @torch.no_grad()
        def call(k: Tensor, v: Tensor) -> Tensor:
            for x, new in zip(pages, (k, v), strict=True):
                x[page, row] = new
            return pages[1]

        return call

    shape = f"N={sum(lengths)} H={cache.heads} D={cache.width} B={_PAGE}"
    arguments = cache.arguments | {**leaves, "page_table": table, "positions": positions}
    del arguments["lengths"]
    options: dict[str, Any] = {"leaves": leaves, "moved": 4 * rows.numel() * rows.element_size()}
    options["select"] = lambda results: cache.pages[1]
    peers = {"torch index_put": index_put}
    return case_of("append_to_pages", "", shape, arguments, (), peers, **options)


def _top_k(workload: Workload, rows: int, k: int, kind: str) -> Case:
    """Next tokens and probabilities; only the latter are compared, as classes may tie."""
    classes, width = workload.widths.vocabulary, workload.width
    weight, k = workload.draw(classes, width, scale=width**-0.5).detach(), min(k, classes)
    leaves = {"hidden": workload.draw(rows, width).detach(), "weight": weight}
    moved = sum(x.numel() * x.element_size() for x in leaves.values()) + 12 * rows * k
    options: dict[str, Any] = {"leaves": leaves, "moved": moved}
    options["select"] = lambda results: results[0]
    shape = f"N={rows} C={width} V={classes} k={k}"
    eager = lambda: lambda x, weight: F.linear(x, weight).float().log_softmax(-1).topk(k)[0]
    arguments, peers = {**leaves, "k": k}, {"torch eager": eager}
    return case_of("projected_top_k", kind, shape, arguments, (), peers, **options)


# --- features, in float32 as in training ----------------------------------------------------------

_SLOT, _HOP, _WINDOW, _N_FFT = 8, 160, 400, 512


def features(workload: Workload) -> list[Case]:
    """Windows of 25 ms, norm of each band, and Canary's SpecAugment: 2 bands, 10 stretches."""
    slots, text = workload.frame_layout, workload.describe()
    samples = [_SLOT * _HOP * length for length in slots.lengths]
    rows = _SLOT * _HOP * (slots.rows + 1)
    layout = PackedLayout.from_lengths(samples, slots.device, rows=rows)
    audio = workload.rows_of(layout).detach().float()
    window = torch.hann_window(_WINDOW, device=slots.device)
    arguments = {"audio": audio, "window": window, "layout_audio": layout, "layout_slots": slots}
    arguments |= {"rows_per_slot": _SLOT, "hop": _HOP, "n_fft": _N_FFT, "preemphasis": 0.97}
    moved = audio.element_size() * (audio.numel() + _SLOT * slots.rows * _N_FFT)
    shape = f"{text} W={_WINDOW} F={_N_FFT}"
    windows = case_of("audio_windows", "", shape, arguments, moved=moved)

    x = workload.rows_of(slots.scaled(_SLOT), workload.widths.mels).detach().float()
    arguments = {"x": x, "lengths": slots.cu_seqlens.diff().long() * _SLOT, "layout": slots}
    arguments["rows_per_slot"] = _SLOT
    generator = torch.Generator(x.device).manual_seed(4)
    freq, time = (
        torch.rand(2, slots.num_sequences, count, device=x.device, generator=generator)
        for count in (2, 10)
    )
    masks = {"freq_shares": freq, "freq_width": 27, "time_shares": time, "time_width": 0.05}
    shape, moved = f"{text} C={x.shape[1]}", 2 * x.numel() * x.element_size()
    normalized = case_of("normalize_features", "", shape, arguments, moved=moved)
    masked = case_of("mask_features", "", shape, arguments | masks, moved=moved)
    return [windows, normalized, masked]
