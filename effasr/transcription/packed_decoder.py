"""The attention decoder in inference on a CPU: a step through all layers in one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effasr.model.decoder import Decoder, DecoderLayer
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.feed_forward import FeedForward
from effasr.nn.linear import JoinedLinear, Linear, whole_bias
from effasr.nn.lora import LoRALinear
from effasr_kernels.shared.cpu import decoder as cpu_decoder
from effasr_kernels.shared.cpu.decoder import Cache, DecoderWeights, Norm, PanelMatrix


class PackedDecoder:
    """Copies of a decoder's weights, and its `step` and `likeliest` by the kernels for CPUs.

    What a row gets depends on neither the other rows nor their number. It differs from the result
    of `Decoder.step` by rounding. Steps whose attention is watched, and those of other dtypes and
    of paged caches, are the decoder's own.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Copy the current weights; `can_pack` says whether that is possible."""
        self._decoder = decoder
        config = decoder.config
        table = decoder.position_table().float()
        norm = decoder.embedding_layernorm
        self._output = PanelMatrix.from_weight(decoder.output_weight, decoder.output_bias)
        self._weights = DecoderWeights(
            layers=[_packed_layer(layer) for layer in decoder.decoder_layers()],
            tokens=decoder.embed_tokens.weight.detach().contiguous(),
            positions=table.contiguous(),
            embedding_norm=None if norm is None else _packed_norm(norm),
            norm=_packed_norm(decoder.norm),
            heads=config.heads,
            head_width=config.head_width,
            activation=config.activation,
        )

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        sizes = state.sizes
        is_served = sizes.dtype == torch.float32 and sizes.device.type == "cpu"
        if not is_served or state.paged or state.watched is not None:
            return Decoder.step(self._decoder, tokens, state)
        own, speech = state.reserve()
        hidden = self._weights.step(
            tokens.contiguous(),
            state.positions,
            state.going,
            state.frames_each,
            self_cache=Cache(own.held),
            cross_cache=Cache(speech.held),
            hypotheses=state.hypotheses,
            most_position=state.last_position,
        )
        state.length += 1
        return hidden

    @torch.no_grad()
    def likeliest(self, hidden: Tensor, classes: int | None = None) -> Tensor:
        if hidden.dtype != torch.float32:
            return Decoder.likeliest(self._decoder, hidden, classes)
        return cpu_decoder.largest_logit(hidden, self._output, classes)


def can_pack(decoder: Decoder) -> bool:
    """Return whether the kernels exist and all weights are plain float32 ones on a CPU."""
    if cpu_decoder.unsupported_reason() is not None or decoder.config.experts is not None:
        return False
    is_plain = all(
        type(p) in (Tensor, nn.Parameter) and p.device.type == "cpu" and p.dtype == torch.float32
        for p in decoder.parameters()
    )
    return is_plain and all(
        type(module) in (nn.Linear, Linear, JoinedLinear) or _is_merged(module)
        for module in decoder.modules()
        if isinstance(module, nn.Linear)
    )


def _is_merged(module: nn.Module) -> bool:
    return isinstance(module, LoRALinear) and module.lora_a is None


def _packed_layer(layer: DecoderLayer) -> cpu_decoder.Layer:
    own, speech, network = layer.self_attn, layer.encoder_attn, layer.mlp
    assert isinstance(network, FeedForward)  # checked by `can_pack`
    return cpu_decoder.Layer(
        self_norm=_packed_norm(layer.input_layernorm),
        cross_norm=_packed_norm(layer.post_attention_layernorm),
        forward_norm=_packed_norm(layer.final_layernorm),
        qkv=_panels(own.qkv_proj),
        self_out=_panels(own.o_proj),
        q=_panels(speech.q_proj),
        cross_out=_panels(speech.o_proj),
        first=_panels(network.linear1),
        second=_panels(network.linear2),
    )


def _panels(module: nn.Linear) -> PanelMatrix:
    return PanelMatrix.from_weight(module.weight, whole_bias(module))


def _packed_norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)
