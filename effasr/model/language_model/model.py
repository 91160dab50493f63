"""A causal language model behind a speech encoder, and the adapter between them."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from effasr.data.conversation.batch import ConversationBatch
from effasr.model.language_model.architecture import build_model
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_model.packed_attention import (
    CONTEXT,
    IMPLEMENTATION,
    AttentionContext,
    PackedContext,
)
from effasr.nn.linear import Linear
from effasr.nn.residual import is_fused
from effasr_kernels import PackedLayout, gated_activation, rms_norm

# Gives modules of transformers' language models forwards that are one operation each.
#
# A module is recognized by what it is and what it computes, never by its family: a module with the
# parts of an RMS norm or of a gated feed-forward network is called on random rows, and where the
# result is that of the operation, its forward is replaced. The others keep their own.


_ROWS = 64
_SCALES = -3, 2
"""Powers of 10 between which the scales of probed rows lie: a small row shows the epsilon, a large
one a bound."""

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Largest difference from a module's own result, as a share of the largest value of a row."""

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Those of `gated_activation`."""

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names of the epsilon of a norm."""

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of modules that an operation may replace."""

    name: str  # As shown to users, in the plural
    resembles: Callable[[nn.Module], bool]  # Whether a module has the parts of this kind
    fused: Callable[[nn.Module], Forward | None]


@dataclass(slots=True)
class FusedModules:
    """The modules of a model whose forward is an operation, and those that only resemble them."""

    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Such as ``9 of 9 RMS norms, 2 of 2 gated feed-forward networks``."""
        return ", ".join(f"{a} of {b} {name}" for name, (a, b) in self.counts.items())

    def suspend(self) -> None:
        for module, _ in self.forwards:
            del module.forward

    def resume(self) -> None:
        for module, forward in self.forwards:
            module.forward = forward


def fuse(model: nn.Module) -> FusedModules:
    """Replace the forwards of the modules that compute what an operation does.

    On a CPU, and wherever else the operation has no kernel, the module's own forward is called.
    """
    fused = FusedModules()
    for module in model.modules():
        for kind in KINDS:
            if not kind.resembles(module):
                continue
            forward = kind.fused(module)
            count, of = fused.counts.get(kind.name, (0, 0))
            fused.counts[kind.name] = count + (forward is not None), of + 1
            if forward is not None:
                fused.forwards.append((module, forward))
    fused.resume()
    return fused


@cache
def fused_modules(architecture: str) -> str:
    """How many modules of each kind are fused in a language model, as shown to users."""
    with torch.device("meta"):
        return str(fuse(build_model(architecture)))


def _resembles_norm(module: nn.Module) -> bool:
    """It has one vector of weights and an epsilon, and nothing else."""
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].ndim == 1
        and not list(module.children())
        and _epsilon(module) is not None
    )


def _epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPSILONS)
    return next((x for x in values if isinstance(x, float)), None)


def _fused_norm(module: nn.Module) -> Forward | None:
    weight, eps = module.weight, _epsilon(module)
    assert isinstance(weight, Tensor)
    assert eps is not None
    x, probe = _random(_ROWS, len(weight)), _copy(module)
    # Of the size of 1.
    drawn = F.normalize(_random(1, len(weight), seed=1)[0], dim=0) * len(weight) ** 0.5
    probe.weight = nn.Parameter(drawn, requires_grad=False)
    for offset in (0, 1):
        call: Any = partial(rms_norm, weight=probe.weight, eps=eps, offset=offset)
        # Where the result is rounded, and its dtype, show in rows that are not those of the weight.
        if all(_equal(probe, call, x.to(dtype)) for dtype in _TOLERANCES):
            return partial(_norm_forward, module, eps, offset)
    return None


def _norm_forward(module: Any, eps: float, offset: Any, hidden_states: Tensor) -> Tensor:
    if not is_fused(hidden_states):
        return type(module).forward(module, hidden_states)
    return rms_norm(hidden_states, module.weight, eps=eps, offset=offset)


_GATED = {"gate_proj", "up_proj", "down_proj"}
_JOINED = {"gate_up_proj", "down_proj"}


def _resembles_gated(module: nn.Module) -> bool:
    """It has projections to gates and values, an activation, and a projection back."""
    linear = {name for name, x in module.named_children() if isinstance(x, nn.Linear)}
    # Neither a gate that learns nor one that drops is an activation.
    owners = {name.partition(".")[0] for name, _ in module.named_parameters()}
    drops = any(isinstance(x, nn.Dropout) for x in module.children())
    return linear in (_GATED, _JOINED) and owners == linear and not drops


def _fused_gated(module: nn.Module) -> Forward | None:
    """Probe with projections that return given rows, whatever the size of the real ones."""
    joined = hasattr(module, "gate_up_proj")
    x, gates, values = (_random(_ROWS, 16, seed=seed) for seed in range(3))
    probe = _copy(module)
    if joined:
        # Transformers' order.
        outputs = {"gate_up_proj": torch.cat([gates, values], -1)}
    else:
        outputs = {"gate_proj": gates, "up_proj": values}
    for name, rows in outputs.items():
        setattr(probe, name, _Given(x, rows))
    probe.down_proj = nn.Identity()
    for activation in _ACTIVATIONS:
        call: Any = partial(gated_activation, activation=activation)
        if _equal(probe, lambda _, call=call: call(gates, values), x):
            run = _joined_forward if joined else _gated_forward
            return partial(run, module, activation)
    return None


def _gated_forward(module: Any, activation: Any, x: Tensor) -> Tensor:
    if not is_fused(x):
        return type(module).forward(module, x)
    gates, values = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(gated_activation(gates, values, activation=activation))


def _joined_forward(module: Any, activation: Any, hidden_states: Tensor) -> Tensor:
    if not is_fused(hidden_states):
        return type(module).forward(module, hidden_states)
    gates, values = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return module.down_proj(gated_activation(gates, values, activation=activation))


KINDS = (
    Kind("RMS norms", _resembles_norm, _fused_norm),
    Kind("gated feed-forward networks", _resembles_gated, _fused_gated),
)
"""What is recognized."""


class _Given(nn.Module):
    """Returns the stored rows for the input that it expects."""

    def __init__(self, expected: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.expected, self.rows = expected, rows

    def forward(self, x: Tensor) -> Tensor:
        if x.shape != self.expected.shape or not torch.equal(x, self.expected):
            raise ValueError("another input")
        return self.rows


def _copy(module: nn.Module) -> Any:
    probe = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(probe, name, dict(getattr(module, name)))
    return probe


def _random(rows: int, width: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    scales = torch.logspace(*_SCALES, rows, device="cpu")
    return torch.randn(rows, width, generator=generator, device="cpu") * scales[:, None]


@torch.no_grad()
def _equal(module: nn.Module, operation: Forward, x: Tensor) -> bool:
    try:
        actual = module(x)
    except Exception:  # Modules of any family fail in any way on rows that they do not expect.
        return False
    expected = operation(x)
    if not isinstance(actual, Tensor):
        return False
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    worst = (actual - expected).abs().amax(-1)
    return bool((worst <= _TOLERANCES[x.dtype] * expected.abs().amax(-1)).all())


class StackingAdapter(nn.Module):
    """Stacks k neighbouring frames and projects them: one or two linear layers."""

    def __init__(self, width: int, output: int, stack: int, hidden: int | None):
        super().__init__()
        self.stack = stack
        self.stack_proj = Linear(stack * width, output if hidden is None else hidden)
        self.output_proj = None if hidden is None else Linear(hidden, output)

    def forward(self, encoded: Tensor, stacks: Tensor) -> Tensor:
        """Map frames to rows."""
        # encoded: (T, width); stacks: int64 (A, k), the frames of each row; T for a frame past the
        # end of its clip, which counts as zeros -> (A, output)
        frames = torch.cat([encoded, encoded.new_zeros(1, encoded.shape[1])])
        stacked = frames.index_select(0, stacks.flatten()).view(stacks.shape[0], -1)
        x = self.stack_proj(stacked)
        return x if self.output_proj is None else self.output_proj(F.gelu(x))


_TOLERANCE = 1e-3
"""Largest difference of logits from transformers', as a share of the largest logit."""

_PROBE_ROWS = 7


class LanguageModel(nn.Module):
    """transformers' modules of a language model, and the adapter in front of them.

    Modules that compute what an operation does are `effasr.model.language_model.model`.
    The logits are ``hidden @ output_weight.T + output_bias``; tied weights are one parameter.
    """

    loader = "AutoModelForCausalLM"  # Class of transformers that reads exported weights
    stacks = 1  # Of layers, of which a row passes one

    def __init__(self, config: LanguageModelConfig, encoder_width: int):
        super().__init__()
        if config.architecture is None:
            raise ValueError(
                "`language_model.architecture` must be the content of a config.json here, but is "
                "null: read it from `path`."
            )
        causal = build_model(config.architecture)
        embedding, output = causal.get_input_embeddings(), causal.get_output_embeddings()
        self.config = config
        self.output_name = next(n for n, module in causal.named_modules() if module is output)
        self.model: Any = causal.base_model
        # Before the names of the model's weights in transformers' causal model.
        self.prefix = ""
        if self.model is causal:
            setattr(causal, self.output_name, None)
        else:
            self.prefix = f"{causal.base_model_prefix}."
        # Weights that a folder may have besides, most of them a second time.
        self.tied_names = set(causal.all_tied_weights_keys)
        self.fused = fuse(self.model)
        # A second name of a tied weight would be saved twice.
        self.lm_head = None if output.weight is embedding.weight else output
        width = embedding.weight.shape[1]
        hidden = None if config.adapter == "linear" else config.adapter_width or width
        self.adapter = StackingAdapter(encoder_width, width, config.stack, hidden)
        self.vocab_size: int = output.weight.shape[0]

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def output_weight(self) -> Tensor:
        """(V, width), tied or not."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def output_bias(self) -> Tensor | None:
        return None if self.lm_head is None else self.lm_head.bias

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output_weight, self.output_bias)

    def embed(self, batch: ConversationBatch, encoded: Tensor | None) -> Tensor:
        """Input rows (U, width): embedded tokens, and the speech in their places."""
        # encoded: (T, encoder width), the encoder output of their clips; None without any
        x = self.embed_tokens(batch.tokens.values)
        if encoded is None:
            return x
        speech = self.adapter(encoded, batch.stacks).to(x.dtype)
        # Rows past the last stack go to an additional row.
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return x.index_copy(0, batch.speech_rows, speech)[:-1]

    def forward(
        self, x: Tensor, layout: PackedLayout, batch: ConversationBatch | None = None
    ) -> Tensor:
        """Map input rows (U, width) to hidden states (U, width), each conversation on its own."""
        return self.run(x, layout.positions(), PackedContext(layout))

    def run(self, x: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Map rows (U, width) at these positions, int64 (U,), to hidden states (U, width)."""
        outputs = self.model(
            inputs_embeds=x.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{CONTEXT: context},
        )
        return outputs.last_hidden_state.squeeze(0)

    def checkpoint_activations(self, every: int) -> None:
        """Recompute every ``every``-th layer in the backward, where the layer is in training."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        modules = self.model.modules()
        layers: list[Any] = [x for x in modules if isinstance(x, GradientCheckpointingLayer)]
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % every == 0
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def foreign_modules(self) -> set[nn.Module]:
        """The modules of transformers, which initialize themselves."""
        return {*self.model.modules(), *([] if self.lm_head is None else [self.lm_head])}

    def reset_tables(self) -> None:
        """Compute the tables that are not saved, as transformers does, on the weights' device."""
        device = self.output_weight.device
        for module in self.model.modules():
            missing = [name for name, x in module.named_buffers(recurse=False) if x.is_meta]
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            loaded = [x for x in tensors if not x.is_meta]
            for name in missing:
                persistent = name not in module._non_persistent_buffers_set
                empty = torch.empty_like(module.get_buffer(name), device=device)
                module.register_buffer(name, empty, persistent=persistent)
            if missing:
                # Gemma's embedding has weights as well: this mark keeps transformers from drawing
                # them again.
                for tensor in loaded:
                    tensor._is_hf_initialized = True
                self.model._init_weights(module)
                for tensor in loaded:
                    del tensor._is_hf_initialized

    def causal_names(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the weights here, and in transformers' causal model."""
        for name in self.model.state_dict():
            yield f"model.{name}", f"{self.prefix}{name}"
        if self.lm_head is not None:
            for name in self.lm_head.state_dict():
                yield f"lm_head.{name}", f"{self.output_name}.{name}"

    @torch.no_grad()
    def check_against_transformers(self) -> None:
        """Compare logits with transformers' own: a family may scale them, or attend otherwise."""
        generator = torch.Generator().manual_seed(0)
        weight = self.embed_tokens.weight
        x = torch.randn(2 * _PROBE_ROWS, weight.shape[1], generator=generator)
        x = (x * weight.float().std().cpu()).to(weight)
        layout = PackedLayout.from_lengths([_PROBE_ROWS] * 2, weight.device)
        with _Evaluating(self):
            actual = self.logits(self(x, layout))
            with self._as_causal() as causal:
                rows = x.view(2, _PROBE_ROWS, -1)
                expected = causal(inputs_embeds=rows, use_cache=False).logits.flatten(0, 1)
        worst = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not worst <= _TOLERANCE:
            raise ValueError(
                "`language_model`: packed logits must be those of transformers, but differ by "
                f"{worst:.2g} of the largest: this family of language models computes more than "
                "causal attention and a linear output: choose another one."
            )

    def _as_causal(self) -> "_CausalView":
        return _CausalView(self)


class _CausalView:
    """transformers' causal model with its own attention and forwards, around a `LanguageModel`."""

    def __init__(self, owner: LanguageModel) -> None:
        self._owner = owner

    def __enter__(self) -> Callable[..., Any]:
        owner = self._owner
        assert owner.config.architecture is not None
        with torch.device("meta"):
            causal = build_model(owner.config.architecture)
        setattr(causal, causal.base_model_prefix, owner.model)
        if owner.lm_head is not None:
            causal.set_submodule(owner.output_name, owner.lm_head)
        else:
            causal.get_output_embeddings().weight = owner.embed_tokens.weight
        # The configuration of the layers is that of the owner.
        causal.config = owner.model.config
        owner.model.set_attn_implementation("eager")
        owner.fused.suspend()
        return causal.eval()

    def __exit__(self, *args: object) -> None:
        self._owner.model.set_attn_implementation(IMPLEMENTATION)
        self._owner.fused.resume()


class _Evaluating:
    def __init__(self, module: nn.Module) -> None:
        self._modes = [(x, x.training) for x in module.modules()]
        self._module = module

    def __enter__(self) -> None:
        self._module.eval()

    def __exit__(self, *args: object) -> None:
        for module, mode in self._modes:
            module.training = mode
