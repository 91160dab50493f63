r"""LoRA: train a low-rank product that is added to a frozen matrix.

.. math:: y = W x + b + s \, B A x

A has r rows and B r columns, so that the frozen weights need neither gradient nor optimizer state.
B starts at zero: training starts from the function of the adapted model.

References:
    Hu et al., 2022, https://arxiv.org/abs/2106.09685; Kalajdzievski, 2023,
    https://arxiv.org/abs/2312.03732 (rank stabilization).
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.checks import check, check_dropouts, check_positive
from effasr.data.languages import AUTO, language_code
from effasr.data.prompt import Prompt
from effasr.nn.experts import GroupedLinear
from effasr.nn.linear import whole_bias
from effasr.nn.parameters import matching
from effasr_kernels import PackedLayout, grouped_linear
from effasr_kernels.shared.cpu.linear import linear

_PROJECTIONS = ("qkv_proj", "q_proj", "kv_proj", "o_proj", "linear1", "linear2")
"""Layers of attention and feed-forward networks; the first and third hold several in one matrix."""

_LANGUAGE_MODEL = "language_model.model."
_ROUTERS = {"router", "gate", "shared_expert_gate"}
"""Parts of transformers' names of linear layers that choose or weight experts."""

_READ_ELSEWHERE = (
    "ctc_head",
    "encoder.subsampling.linear",
    "transducer.output",
    "language_model.lm_head",
)
"""Layers whose weights an operation reads directly, without the layer's forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """Adapted layers and the rank of their adapters.

    Attributes:
        rank: r, of each adapter; queries, keys and values share one, as they are one matrix here.
        alpha: The adapter's output is multiplied by ``alpha / rank``.
        rslora: Multiply by ``alpha / sqrt(rank)`` instead, so that higher ranks learn as fast.
        dropout: Dropout of the adapter's input.
        targets: Patterns of linear layers to adapt, such as ``decoder.*``; null for all projections
            of attention and feed-forward networks; in the layers of a language model these are all
            ``nn.Linear`` but routers. Each expert of a network has adapters of its own.
        also_train: Patterns of other parameters to train, such as ``*norm*`` or ``ctc_head``.
        by_language: Languages that each have an adapter, of ``rank``, beside every adapted layer:
            the rows of an utterance use that of its source language, also in a batch of several.
            Utterances in other languages use the weights without an adapter.
    """

    rank: int = 32
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    also_train: tuple[str, ...] = ()
    by_language: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        codes = tuple(language_code(name) for name in self.by_language)
        object.__setattr__(self, "by_language", codes)
        check(len(codes) == len(set(codes)), "by_language", "name each language once", codes)
        check_positive(self, "rank")
        check(self.alpha > 0, "alpha", "be positive", self.alpha)
        check_dropouts(self)
        rule = "have at least one pattern"
        remedy = "leave it out for all projections, or train without `lora`"
        check(self.targets is None or self.targets, "targets", rule, "empty", remedy)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class LanguageAdapters:
    """Numbers the languages that have adapters; ``len(languages)`` is that of all others."""

    languages: tuple[str, ...]
    route = "language"

    def number_of(self, prompt: Prompt) -> int:
        """The number of the adapter for an utterance, see `effasr.data.batch.Batch.expert`."""
        rule = f"be named for a model with adapters by language ({', '.join(self.languages)})"
        check(prompt.source != AUTO, "language", rule, AUTO, "name `lang`, or give `--language`")
        known = prompt.source in self.languages
        return self.languages.index(prompt.source) if known else len(self.languages)


class LanguageRoute:
    """Says which adapter each row that some layers read has, as only their stack knows."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Tensor | None = None  # bool (T, count): at most one of a row is true

    def set(self, number: Tensor | None, layout: PackedLayout | None) -> None:
        # number: int64 (N,), of each sequence, or of each row without a layout
        if number is None:
            raise ValueError(
                "`expert` must be the number of each utterance's language for a model with "
                "adapters by language, but is None: see `LanguageAdapters.number_of`."
            )
        if layout is not None:
            number = F.pad(number, (0, 1), value=self.count)[layout.sequence_ids()]
        self.rows = number[:, None] == torch.arange(self.count, device=number.device)

    def select(self, narrow: Tensor) -> Tensor:
        """Zero what the adapters of other languages give: (T, count r)."""
        assert self.rows is not None
        # A product with a mask is of one shape, and reads no row's language on the host.
        return (narrow.unflatten(-1, (self.count, -1)) * self.rows[..., None]).flatten(-2)


def route_rows(
    stack: nn.Module, number: Tensor | None, layout: PackedLayout | None, rows: str = "rows"
) -> None:
    """Tell the adapters of a stack, if they are by language, the language of each row.

    ``rows``: of the decoder ``encoded`` for what its cross-attention reads.
    """
    if has_languages(stack):
        stack.language_routes[rows].set(number, layout)


def has_languages(stack: nn.Module) -> TypeGuard[Any]:
    return getattr(stack, "language_routes", None) is not None


class _Adapted(nn.Module):
    """A layer with an adapter; ``weight`` and ``bias`` are those of the adapted layer.

    ``lora_a`` (r, in), ``lora_b`` (out, r) and ``lora_scale`` () are all that merging needs; they
    are None while the adapter is `merged`. Of several experts the first two are (experts, r, in)
    and (experts, out, r); r is the sum of those of all languages.
    """

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    lora_scale: Tensor | None

    route: LanguageRoute | None = None

    def _share(self, base: nn.Linear | GroupedLinear, config: LoRAConfig) -> None:
        """Take the parameters of a layer, and draw an adapter."""
        rank = config.rank * max(len(config.by_language), 1)
        self.weight, self.bias, self.dropout = base.weight, base.bias, config.dropout
        *experts, outputs, width = base.weight.shape
        self.lora_a = nn.Parameter(base.weight.new_empty(*experts, rank, width))
        self.lora_b = nn.Parameter(base.weight.new_zeros(*experts, outputs, rank))
        # A tensor, so that it is saved with the weights; float32 is precise enough.
        self.register_buffer("lora_scale", base.weight.new_tensor(config.scale))
        for adapter in self.lora_a if experts else [self.lora_a]:
            nn.init.kaiming_uniform_(adapter, a=math.sqrt(5))


class LoRALinear(_Adapted, nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, base: nn.Linear, config: LoRAConfig):
        has_bias = base.bias is not None
        super().__init__(base.in_features, base.out_features, bias=has_bias, device="meta")
        self.biased = getattr(base, "biased", None)
        self._share(base, config)

    def forward(self, input: Tensor) -> Tensor:
        y = linear(input, self.weight, whole_bias(self))
        if self.lora_a is None or self.lora_b is None or self.lora_scale is None:
            return y
        dropped = F.dropout(input, self.dropout, self.training)
        # The scale is applied to the smallest tensor.
        narrow = linear(dropped, self.lora_a) * self.lora_scale
        if self.route is not None:
            narrow = self.route.select(narrow)
        return y + linear(narrow, self.lora_b)


class LoRAGroupedLinear(_Adapted, GroupedLinear):
    """Linear layers of several experts, each with an adapter."""

    def __init__(self, base: GroupedLinear, config: LoRAConfig):
        count, outputs, width = base.weight.shape
        with torch.device("meta"):
            super().__init__(count, width, outputs, bias=base.bias is not None)
        self._share(base, config)

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        y = super().forward(x, layout)
        if self.lora_a is None or self.lora_b is None or self.lora_scale is None:
            return y
        dropped = F.dropout(x, self.dropout, self.training)
        narrow = grouped_linear(dropped, self.lora_a, layout) * self.lora_scale
        return y + grouped_linear(narrow, self.lora_b, layout)


def adapt(model: nn.Module, config: LoRAConfig) -> None:
    """Add adapters to linear layers in place, and train only these and ``also_train``."""
    layers = {
        name: x for name, x in model.named_modules() if isinstance(x, (nn.Linear, GroupedLinear))
    }
    if config.targets is None:
        targets = {name for name in layers if _is_projection(name)}
        names = (name for name, _ in model.named_parameters())
        if any(name.startswith(_LANGUAGE_MODEL) for name in names) and not any(
            name.startswith(_LANGUAGE_MODEL) for name in targets
        ):
            raise ValueError(
                "`lora.targets` must be given for a language model whose layers have no nn.Linear, "
                "such as GPT-2, but is null: name other layers, such as encoder.layers.*, or take "
                "another language model."
            )
    else:
        targets = matching(layers, config.targets, "lora.targets")
    for name in _READ_ELSEWHERE:
        if name in targets:
            raise ValueError(
                f"`lora.targets` must not match {name}, whose weights are read without its "
                "forward: narrow the pattern, such as encoder.layers.*, or name it in "
                "lora.also_train."
            )
    parameters = dict(model.named_parameters())
    also = matching(parameters, config.also_train, "lora.also_train")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in also)
    routes = _routes(model, targets, config) if config.by_language else {}
    for name in sorted(targets):
        layer = layers[name]
        if isinstance(layer, GroupedLinear):
            adapted: nn.Module = LoRAGroupedLinear(layer, config)
        else:
            adapted = LoRALinear(layer, config)
            adapted.route = routes.get(name)
        model.set_submodule(name, adapted)


def _routes(model: nn.Module, targets: set[str], config: LoRAConfig) -> dict[str, LanguageRoute]:
    """Give each stack with targets its routes; return that of each target."""
    routes: dict[str, LanguageRoute] = {}
    for name in sorted(targets):
        stack: Any = model.get_submodule(name.partition(".")[0])
        is_row = ".layers." in name and not name.endswith(("relative_k_proj", "self_attn.gate"))
        if (
            name.startswith(_LANGUAGE_MODEL)
            or not is_row
            or isinstance(model.get_submodule(name), GroupedLinear)
        ):
            raise ValueError(
                f"`lora.by_language` must be empty to adapt {name}, whose rows are not those of "
                "utterances in order: narrow `lora.targets`, such as to *_proj in encoder.layers."
            )
        if not has_languages(stack):
            # Beside the parameters of the stack, and none of them.
            stack.language_routes = {
                rows: LanguageRoute(len(config.by_language)) for rows in ("rows", "encoded")
            }
        of_encoded = name.endswith("encoder_attn.kv_proj")
        routes[name] = stack.language_routes["encoded" if of_encoded else "rows"]
    return routes


def adapt_by_language(
    model: nn.Module, languages: tuple[str, ...], state: Mapping[str, Tensor]
) -> None:
    """Add the adapters that a state dict has."""
    ranks = {
        name.removesuffix(".lora_a"): len(x) // len(languages)
        for name, x in state.items()
        if name.endswith(".lora_a")
    }
    if ranks:
        rank = min(ranks.values())
        adapt(model, LoRAConfig(rank=rank, targets=tuple(ranks), by_language=languages))


def adapt_alike(other: nn.Module, model: nn.Module) -> None:
    """Add adapters by language to a copy of a stack, as ``model`` has them, with its routes."""
    if has_languages(model):
        other.language_routes = model.language_routes
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear) and layer.lora_a is not None:
            twin = LoRALinear(
                cast("nn.Linear", other.get_submodule(name)), LoRAConfig(rank=len(layer.lora_a))
            )
            twin.route = layer.route
            other.set_submodule(name, twin)


def _is_projection(name: str) -> bool:
    if not name.startswith(_LANGUAGE_MODEL):
        return name.rpartition(".")[2] in _PROJECTIONS
    # Each family has its own names, but all number their layers; what is outside of these belongs
    # to the embeddings or the output.
    parts = name.split(".")
    return any(part.isdigit() for part in parts[:-1]) and _ROUTERS.isdisjoint(parts)


def adapters(model: nn.Module) -> list[LoRALinear | LoRAGroupedLinear]:
    kinds = LoRALinear, LoRAGroupedLinear
    return [module for module in model.modules() if isinstance(module, kinds)]


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Merge the adapters for the length of a context; a copy restores the weights.

    Adapters by language stay beside their layers, as none serves all utterances.
    """
    saved = []
    try:
        for module in adapters(model):
            a, b, scale = module.lora_a, module.lora_b, module.lora_scale
            if a is None or b is None or scale is None or module.route is not None:
                continue
            with torch.no_grad():
                saved.append((module, a, b, scale, module.weight.clone()))
                # In place, because derived weights are checked by version.
                module.weight.copy_(_sum(module.weight, a, b, scale))
            module.lora_a = module.lora_b = module.lora_scale = None
        yield
    finally:
        for module, a, b, scale, weight in saved:
            module.lora_a, module.lora_b, module.lora_scale = a, b, scale
            with torch.no_grad():
                module.weight.copy_(weight)


@torch.no_grad()
def without_adapters(
    state: Mapping[str, Tensor], language: tuple[int, int] = (0, 1)
) -> dict[str, Tensor]:
    """A state dict with adapters merged into the weights.

    ``language``: the number of the language whose adapters are merged, and how many there are.
    """
    number, count = language
    plain = dict(state)
    for name in state:
        layer, _, part = name.rpartition(".")
        parts = [f"{layer}.{key}" for key in ("weight", "lora_a", "lora_b", "lora_scale")]
        if part == "lora_a" and all(key in plain for key in parts):
            weight, a, b, scale = (plain.pop(key) for key in parts)
            a, b = a.chunk(count, -2)[number], b.chunk(count, -1)[number]
            plain[parts[0]] = _sum(weight, a, b, scale)
    return plain


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """W + s B A in float64: rounded once, independent of the precision of GPU products."""
    return (weight.double() + scale.double() * (b.double() @ a.double())).to(weight.dtype)
