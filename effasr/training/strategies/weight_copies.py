"""Copies of the weights in bfloat16 for forward and backward, cast once an update.

Autocast casts a float32 weight at its first use in every micro-batch, with one launch for each
weight, and its gradient back, with another. Here all weights of matrix products and kernels are
cast before the first micro-batch of a step, in a few multi-tensor launches, and the gradients of a
layer together. The weights are those of autocast. Of linear layers on a GPU, the product that
computes the gradient writes it in float32, or adds it to ``grad``; gradients of other weights are
rounded to bfloat16, as by autocast, then added up over micro-batches in float32. Optimizer,
checkpoints and validation see only the float32 weights.

Kernels leave the gradients of small parameters, such as biases, in partial sums, and linear layers
leave those of their biases in the gradients of their outputs. Those of a layer are added up where
the gradients of the layer meet, in one launch for all (`effasr_kernels.runtime.deferred_sums`). For
that the weights of its norms take part; they are not cast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr import ranges
from effasr.model.decoder import Decoder
from effasr.nn.attention import RelativeSelfAttention
from effasr.nn.convolution import DepthwiseConv
from effasr.nn.experts import GroupedLinear
from effasr.nn.predictor import LSTM
from effasr_kernels.runtime.deferred_sums import Share

_CAST: tuple[tuple[type[nn.Module], tuple[str, ...] | None], ...] = (
    (nn.Linear, None),
    (nn.Conv1d, None),
    (nn.Conv2d, None),
    (DepthwiseConv, None),
    (GroupedLinear, None),
    (LSTM, None),
    (RelativeSelfAttention, ("bias_u", "bias_v")),
    (Decoder, ("untied_weight", "output_bias")),
)
"""Modules with parameters that autocast casts at every use, and the names of these; None for all.

Norms and embeddings are computed in float32. A parameter that is missing here is cast by autocast.
"""


class WeightCopies:
    """Copies of the weights that a model's matrix products and kernels read under autocast.

    ``lazily``: a layer's copies are connected to its weights when it is called, so that its
    gradients are complete, and can be exchanged, before the backward reaches the layer below. A
    compiled model has to have them before the call. ``accumulate``: gradients of later
    micro-batches are added to ``grad`` directly, without a launch per weight; hooks of the
    parameters miss these micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.bfloat16,
        *,
        lazily: bool = True,
        accumulate: bool = False,
    ) -> None:
        self._accumulate = accumulate
        roots = {"": model}
        if lazily:
            lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
            roots |= {f"{n}.{k}": layer for n, m in lists.items() for k, layer in enumerate(m)}
        slots: dict[str, list[_Slot]] = {name: [] for name in roots}
        norms: dict[str, list[_Slot]] = {name: [] for name in roots}
        for path, module in model.named_modules():
            root = max((name for name in roots if _is_within(path, name)), key=len)
            slots[root] += [(module, name) for name in _names(module)]
            if root and isinstance(module, nn.LayerNorm):
                used = [name for name, x in module._parameters.items() if x is not None]
                norms[root] += [(module, name) for name in used]
        self._layers = [
            (roots[name], _Layer(in_layer, dtype, norms[name]))
            for name, in_layer in slots.items()
            if name and in_layer
        ]
        self._outside = _Layer(slots[""], dtype, is_short=False)
        layers = [self._outside, *(layer for _, layer in self._layers)]
        self._trained = [pair for layer in layers for pair in layer.pairs if pair[0].requires_grad]
        self._frozen = [
            pair for layer in layers for pair in layer.pairs if not pair[0].requires_grad
        ]
        self._versions: dict[bool, list[int]] = {}
        # Weights whose gradient the first micro-batch of a step replaces, as the first product does
        # not read it: if it is of speech, and if it is of text alone.
        self._replaced: dict[bool, set[Tensor]] = {False: set(), True: set()}
        self._follows_updates = False

    def follow_updates(self) -> dict[Tensor, Tensor]:
        """Return the copies of trained weights, which from now on an update writes, too."""
        self._follows_updates = True
        return dict(self._trained)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights anew, after which a step may use them.

        Frozen ones, and those whose copies an update writes, only if something else changed them:
        no fused optimizer counts as a change in their versions.
        """
        with ranges.range("cast weights"):
            for is_trained, pairs in ((True, self._trained), (False, self._frozen)):
                versions = [master._version for master, _ in pairs]
                is_updated = is_trained and not self._follows_updates
                if is_updated or versions != self._versions.get(is_trained):
                    _copy(pairs)
                    self._versions[is_trained] = versions

    @property
    def replaced(self) -> set[Tensor]:
        """Weights whose gradient may stay from one step to the next, see `clear_others`."""
        return self._replaced[False] | self._replaced[True]

    def clear_others(self, *, is_text: bool) -> None:
        """Zero those gradients of `replaced` that the first micro-batch does not replace."""
        others = self.replaced - self._replaced[is_text]
        gradients = [weight.grad for weight in others if weight.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def in_use(
        self, *, accumulate: bool = False, replace: bool = False, is_text: bool = False
    ) -> Iterator[None]:
        """Let the modules have the copies in place of their weights, in forward and backward.

        A checkpointed layer reads its weights in the backward again. Gradients arrive at the
        float32 parameters. ``accumulate``: whether the backward in the block adds to ``grad``, as
        `Tensor.backward` does, and no rank waits for a hook. ``replace``: whether gradients that
        are there already are of an earlier step, to be replaced by those of speech or ``is_text``.
        """
        layers = [self._outside, *(layer for _, layer in self._layers)]
        for layer in layers:
            layer.accumulates = accumulate and self._accumulate
            layer.replaced = self._replaced[is_text]
            layer.stale = set(layer.masters) if replace and layer.accumulates else set()
        handles = [
            root.register_forward_pre_hook(layer.connect_before) for root, layer in self._layers
        ]
        self._outside.connect()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in layers:
                layer.restore()


_Slot = tuple[nn.Module, str]


class _Layer:
    """The weights of a layer and their copies; ``norms`` have no copies."""

    def __init__(
        self,
        slots: Sequence[_Slot],
        dtype: torch.dtype,
        norms: Sequence[_Slot] = (),
        *,
        is_short: bool = True,
    ) -> None:
        # Its backward is so short that gradients with a row for each frame may wait for its end.
        self.is_short = is_short
        # Sizes that are no multiple of 16 bytes come last, so that the gradients of the others
        # are aligned in one buffer.
        order = sorted(slots, key=lambda slot: _parameter(slot).numel() % 4 != 0)
        self._trained = [slot for slot in order if _parameter(slot).requires_grad]
        self._frozen = [slot for slot in order if not _parameter(slot).requires_grad]
        masters = [_parameter(slot) for slot in (*self._trained, *self._frozen)]
        # Weights and copies.
        self.pairs = [(x, torch.empty_like(x, dtype=dtype, requires_grad=False)) for x in masters]
        # Whether a backward adds to ``grad`` itself.
        self.accumulates = False
        # Weights whose ``grad`` is of an earlier step, and those where a product has replaced it.
        self.stale: set[Tensor] = set()
        self.replaced: set[Tensor] = set()
        self._is_connected = False
        self._norms = [slot for slot in norms if _parameter(slot).requires_grad]
        self._of_norms = [_parameter(slot) for slot in self._norms]

    @property
    def masters(self) -> list[Tensor]:
        """The trained weights, float32; last those of norms."""
        return [*(master for master, _ in self.pairs[: len(self._trained)]), *self._of_norms]

    @property
    def copies(self) -> list[Tensor]:
        """What forward and backward have in place of ``masters``."""
        return [*(copy for _, copy in self.pairs[: len(self._trained)]), *self._of_norms]

    def connect_before(self, module: nn.Module, args: Any) -> None:
        self.connect()

    def connect(self) -> None:
        """Give the modules the copies, whose gradients lead to the weights."""
        if self._is_connected:
            return
        self._is_connected = True
        trained = [*self._trained, *self._norms]
        connected = _Connect.apply(self, *self.masters) if trained else ()
        frozen = [copy for _, copy in self.pairs[len(self._trained) :]]
        for (module, name), copy in zip(trained, connected, strict=True):  # type: ignore[arg-type]
            module._parameters[name] = copy
        for (module, name), copy in zip(self._frozen, frozen, strict=True):
            module._parameters[name] = copy  # type: ignore[assignment]

    def restore(self) -> None:
        if not self._is_connected:
            return
        self._is_connected = False
        for (module, name), (master, _) in zip(
            (*self._trained, *self._frozen), self.pairs, strict=True
        ):
            module._parameters[name] = master  # type: ignore[assignment]
        for (module, name), master in zip(self._norms, self._of_norms, strict=True):
            module._parameters[name] = master  # type: ignore[assignment]

    def gradients(
        self,
        upstream: Sequence[Tensor | None],
        shares: Sequence[Share],
        products: dict[int, Tensor],
    ) -> list[Tensor | None]:
        """Return the gradients of the weights in their dtype; None for those added to ``grad``."""
        out: list[Tensor | None] = [None] * len(upstream)
        masters = self.masters
        summed = _with_shares(upstream, shares, masters)
        for number, product in products.items():
            other = summed[number]
            summed[number] = product if other is None else product + other
        used = [(number, x) for number, x in enumerate(summed) if x is not None]
        used_masters, gradients = [masters[number] for number, _ in used], [x for _, x in used]
        sums = [master.grad for master in used_masters if master.grad is not None]
        if self.accumulates and len(sums) == len(used):
            _add(sums, gradients)
            return out
        for (number, _), gradient in zip(used, _widened(used_masters, gradients), strict=True):
            out[number] = gradient
        return out


def _add(sums: list[Tensor], gradients: list[Tensor]) -> None:
    if not sums:
        return
    if sums[0].is_cuda and torch.cuda.is_current_stream_capturing():
        # Small gradients, of norms and biases, have one launch together; a sum of two dtypes in a
        # launch of its own moves 10 bytes, not 18.
        pairs = list(zip(sums, gradients, strict=True))
        same = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        if same:
            torch._foreach_add_(*map(list, zip(*same, strict=True)))  # pyright: ignore
        for total, gradient in pairs:
            if total.dtype != gradient.dtype:
                total.add_(gradient)
    else:
        torch._foreach_add_(sums, _widened(sums, gradients))  # pyright: ignore[reportPrivateImportUsage]


class _Connect(Function):
    """Returns copies of weights whose gradients are cast and passed to the weights."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        # Get the gradients that kernels leave in partial sums, and those of products.
        ctx.partial_sums, ctx.products = [], _Products(layer)
        ctx.takes_rows = layer.is_short
        ctx.set_materialize_grads(False)
        # New tensors, because the copies themselves would keep the graph alive.
        return tuple(copy.detach() for copy in layer.copies)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        shares, ctx.partial_sums = ctx.partial_sums, []
        products, ctx.products.sums = ctx.products.sums, {}
        return None, *ctx.layer.gradients(grad_outputs, shares, products)


class _Products:
    """Gradients of a layer's weights that products compute in float32."""

    def __init__(self, layer: _Layer) -> None:
        self._layer = layer
        # Those that are not added to ``grad``, by the number of the weight.
        self.sums: dict[int, Tensor] = {}

    def add(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` to the gradient of a weight; the first product does not read it."""
        # As above, a machine without a GPU may lack Triton.
        from effasr_kernels.shared.projection import multiply, multiply_add

        layer, master = self._layer, self._layer.masters[number]
        if layer.accumulates and master.grad is not None:
            total, is_first = master.grad, master in layer.stale
            if is_first:
                layer.stale.remove(master)
                layer.replaced.add(master)
        else:
            is_first = number not in self.sums
            total = self.sums.setdefault(number, torch.empty_like(master))
        (multiply if is_first else multiply_add)(left, right, total)


def _with_shares(
    upstream: Sequence[Tensor | None], shares: Sequence[Share], like: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients with those that are left in partial sums added, which have other dtypes."""
    gradients = list(upstream)
    if not shares:
        return gradients
    # Only kernels in Triton leave partial sums; a machine without a GPU may lack it.
    from effasr_kernels.shared.partial_sums import sums_of_layer

    waiting = list(dict.fromkeys(share.sums for share in shares))
    sums = dict(zip(waiting, sums_of_layer(waiting), strict=True))
    for share in shares:
        shape = like[share.index].shape
        part = sums[share.sums][share.column : share.column + shape.numel()].view(shape)
        other = gradients[share.index]
        gradients[share.index] = part if other is None else part + other
    return gradients


def _widened(like: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in the dtype of ``like``; those that are cast are views of one buffer."""
    wide = list(tensors)
    pairs = zip(like, tensors, strict=True)
    numbers = [n for n, (x, tensor) in enumerate(pairs) if x.dtype != tensor.dtype]
    if not numbers:
        return wide
    chosen = [like[n] for n in numbers]
    buffer = chosen[0].new_empty(sum(x.numel() for x in chosen))
    for n, target in zip(numbers, _unflatten_dense_tensors(buffer, chosen), strict=True):
        wide[n] = target
    _copy([(tensors[n], wide[n]) for n in numbers])
    return wide


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each first tensor to the second, with other dtypes in multi-tensor launches."""
    # Torch copies the whole list one by one if a single pair differs in its strides.
    together = [(source, target) for source, target in pairs if source.is_contiguous()]
    if together:
        sources, targets = zip(*together, strict=True)
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    if len(together) != len(pairs):
        for source, target in pairs:
            if not source.is_contiguous():
                target.copy_(source)


def _names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters that autocast casts at every use."""
    for kind, names in _CAST:
        if isinstance(module, kind):
            return [
                name
                for name, x in module._parameters.items()
                if x is not None and x.dtype == torch.float32 and (names is None or name in names)
            ]
    return []


def _parameter(slot: _Slot) -> Tensor:
    module, name = slot
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _is_within(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")
