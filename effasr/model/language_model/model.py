"""A causal language model behind a speech encoder, and the adapter between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from effasr.data.conversation.batch import ConversationBatch
from effasr.model.language_model.architecture import build_model
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_model.fused import fuse
from effasr.model.language_model.packed_attention import (
    CONTEXT,
    IMPLEMENTATION,
    AttentionContext,
    PackedContext,
)
from effasr.nn.linear import Linear
from effasr_kernels import PackedLayout


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

    Modules that compute what an operation does are `effasr.model.language_model.fused`.
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

    def _as_causal(self) -> _CausalView:
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
