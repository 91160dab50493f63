"""FLOPs of a training step where only a part of the model is trained."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from effasr.data.sampling.cost import FACTORS, CostModel
from effasr.model.asr import ASRModel
from effasr.model.cost import (
    cost_model,
    language_model_sizes,
    pair_cost,
    predictor_cost,
    subsampling_cost,
    text_cost_model,
)
from effasr.model.decoder import Decoder
from effasr.model.encoder import ConformerLayer
from effasr.nn.experts import ExpertFeedForward, GroupedLinear, Router
from effasr.nn.lora import LoRAGroupedLinear, LoRALinear

if TYPE_CHECKING:
    from effasr.model.language_model.model import LanguageModel

_FORWARD_AND_BACKWARD = 3


def learning_cost(model: ASRModel) -> CostModel:
    """Return a third of the FLOPs of a training step, of an utterance by its lengths.

    For a model that is trained completely this is `effasr.model.cost.cost_model`, as the backward
    costs twice the forward. Otherwise the products for gradients of frozen weights, and everything
    before the first trained one, are left out; those of adapters are added.
    """
    forward = cost_model(model.config, model.vocab_size)
    if _learns(model, throughout=True):
        return forward
    count = _Count()
    reached = count.encoder(model)
    if model.language_prompt is not None:
        reached = count.layer(model.language_prompt, reached, "frame")
    if model.ctc_head is not None:
        count.product("frame", model.ctc_head, reached)
    if model.transducer is not None:
        count.transducer(model, reached)
    count.decoder(model, reached)
    if model.language_model is not None:
        count.language_model(model.language_model, reached)
    if model.best_rq is not None:
        for head in model.best_rq.heads:
            count.product("frame", head, reached)  # type: ignore[arg-type]
    return count.shared(forward)


def learning_text_cost(model: ASRModel) -> CostModel | None:
    """Return the same for a text pair; None for a model without a text encoder."""
    forward = text_cost_model(model.config, model.vocab_size)
    if forward is None or model.text_encoder is None or _learns(model, throughout=True):
        return forward
    count, text, width = _Count(), model.text_encoder, model.config.encoder.width
    reached = _learns(text.embed_tokens, text.embedding_layernorm)
    for layer in text.layers:
        reached = count.layer(layer, reached, "frame", frame_pair=2 * 2 * width)
    reached = reached or _learns(text.norm)
    repeats = text.config.upsample if text.config.shared_layers else 1
    # What reads several rows for each token, and what reads them with the source's labels.
    of_rows, of_labels = _Count(), _Count()
    if text.config.shared_layers:
        reached = of_rows.layers(model, reached, first=-text.config.shared_layers)
        if model.ctc_head is not None:
            of_rows.product("frame", model.ctc_head, reached)
        if model.transducer is not None:
            of_labels.transducer(model, reached)
    of_rows.decoder(model, reached)
    powers = {"frame": 1, "frame_pair": 2, "token_frame": 1, "token": 0, "token_pair": 0}
    for name, flops in of_rows.omitted.items():
        count.omitted[name] += repeats ** powers[name] * flops
    count.omitted["frame"] += repeats * of_labels.omitted["frame"] + of_labels.omitted["token"]
    count.omitted["frame_pair"] += repeats * of_labels.omitted["token_frame"]
    return count.shared(forward)


def unreached_layers(model: ASRModel) -> int:
    """Return the number of first encoder layers that the backward does not reach."""
    encoder, before = model.encoder, _before_layers(model.encoder)
    count = 0
    while count < len(encoder.layers) and not _learns(*before, *encoder.layers[: count + 1]):
        count += 1
    return count


class _Count:
    """FLOPs that a backward omits, by the quantity they grow with; adapters count negatively."""

    def __init__(self) -> None:
        self.omitted: Counter[str] = Counter()

    def shared(self, forward: CostModel) -> CostModel:
        """Return a third of the FLOPs of a step with this forward."""
        whole = {name: _FORWARD_AND_BACKWARD * getattr(forward, name) for name in FACTORS}
        return replace(
            forward,
            **{
                name: (whole[name] - self.omitted[name]) / _FORWARD_AND_BACKWARD for name in FACTORS
            },
        )

    def product(
        self, kind: str, module: nn.Linear | GroupedLinear | Router, reached: bool, share: float = 1
    ) -> None:
        """Count a linear layer; its inputs need gradients if ``reached``, rows use a ``share``."""
        flops = round(2 * share * module.weight.numel())
        self.omitted[kind] += flops * (not module.weight.requires_grad) + flops * (not reached)
        if isinstance(module, (LoRALinear, LoRAGroupedLinear)):
            a, b = module.lora_a, module.lora_b
            if a is not None and b is not None:
                adapter = round(2 * share * (a.numel() + b.numel()))
                self.omitted[kind] -= _FORWARD_AND_BACKWARD * adapter

    def layer(self, layer: nn.Module, reached: bool, kind: str, **others: int) -> bool:
        """Count a layer's products but `_APART`; return whether the backward reaches what follows.

        ``kind`` is what its linear layers grow with; ``others`` are products without weights,
        likewise.
        """
        reached = reached or _learns(layer)
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(_APART):
                self.product(kind, module, reached)
            elif isinstance(module, ExpertFeedForward):
                share = module.config.top_k / module.config.count
                for part in (module.linear1, module.linear2):
                    self.product(kind, part, reached, share)
                if module.router is not None:
                    self.product(kind, module.router, reached)
        for name, flops in others.items():
            self.omitted[name] += 2 * flops * (not reached)
        return reached

    def encoder(self, model: ASRModel) -> bool:
        """Count the speech encoder; returns whether anything in it is trained."""
        encoder = model.encoder
        parts = dict(encoder.named_modules())
        first = next(parts[name] for name in _CONVOLUTIONS if name in parts)
        self.omitted["frame"] += 2 * subsampling_cost(model.config) * (not _learns(first))
        reached = self.layers(model, _learns(*_before_layers(encoder)))
        last = getattr(encoder, "norm", None)
        return reached or (last is not None and _learns(last))

    def layers(self, model: ASRModel, reached: bool, first: int = 0) -> bool:
        """Count the layers of the speech encoder from ``first`` on."""
        encoder, config = model.encoder, model.encoder.config
        for layer in encoder.layers[first:]:
            reached = self.layer(layer, reached, "frame", frame_pair=pair_cost(config))
            if isinstance(layer, ConformerLayer):
                learns = layer.conv.depthwise.weight.requires_grad
                taps = 2 * layer.conv.depthwise.weight.shape[1] * config.width
                self.omitted["frame"] += taps * (not learns) + taps * (not reached)
        return reached

    def decoder(self, model: ASRModel, reached: bool) -> None:
        """Count projection and decoder, after an encoder that is trained if ``reached``."""
        decoder = model.decoder
        if decoder is None:
            return
        if model.projection is not None:
            self.product("frame", model.projection, reached)
            reached = reached or _learns(model.projection)
        inner = decoder.config.heads * decoder.config.head_width
        embedding = decoder.embed_tokens, decoder.embed_positions, decoder.embedding_layernorm
        after = reached or _learns(*(module for module in embedding if module is not None))
        for layer in decoder.layers:
            self.product("frame", layer.encoder_attn.kv_proj, reached)  # type: ignore[union-attr]
            # A token sees u (u + 1) / 2 of the pairs.
            pairs = {"token": 2 * inner, "token_pair": 2 * inner, "token_frame": 4 * inner}
            after = self.layer(layer, after, "token", **pairs)
        self._output(decoder, after or _learns(decoder.norm))

    def language_model(self, model: "LanguageModel", reached: bool) -> None:
        """Count adapter and language model, after an encoder that is trained if ``reached``."""
        sizes = language_model_sizes(model.config)
        for number, layer in enumerate(model.adapter.children()):
            assert isinstance(layer, nn.Linear)
            flops = 2 * layer.weight.numel() // model.config.stack
            learns = layer.weight.requires_grad
            self.omitted["frame"] += flops * (not learns) + flops * (not reached and number == 0)
            reached = reached or _learns(layer)
        reached = reached or _learns(model.embed_tokens)
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                self.product("token", module, reached, 1 / model.stacks)
                reached = reached or _learns(module)
        pairs = sizes.layers * 2 * sizes.attention
        for kind in ("token", "token_pair"):
            self.omitted[kind] += 2 * pairs * (not reached)
        self._output(model, reached)

    def _output(self, decoder: "Decoder | LanguageModel", reached: bool) -> None:
        weight = decoder.output_weight
        flops = 2 * weight.numel()
        self.omitted["token"] += flops * (not weight.requires_grad) + flops * (not reached)

    def transducer(self, model: ASRModel, reached: bool) -> None:
        """Count the transducer; the predictor counts as a whole."""
        head = model.transducer
        assert head is not None
        predicts = _learns(head.predictor)
        self.product("frame", head.encoder_projection, reached)
        self.product("token", head.predictor_projection, predicts)
        projection = 2 * head.predictor_projection.weight.numel()
        self.omitted["token"] += 2 * (predictor_cost(head.config) - projection) * (not predicts)
        before = reached or predicts or _learns(head.encoder_projection, head.predictor_projection)
        self.product("token_frame", head.output, before)


_APART = ("relative_k_proj", "encoder_attn.kv_proj")
"""Projections of a table that does not grow with the utterance, and of another sequence."""

_CONVOLUTIONS = ("stem.convolutions", "stem", "subsampling")
"""What `subsampling_cost` counts; the first that an encoder has."""

_BEFORE_LAYERS = (
    *("subsampling", "subsampling_norm", "stem", "embed_positions", "positions", "input_norm"),
)
"""Parts of an encoder."""


def _before_layers(encoder: nn.Module) -> list[nn.Module]:
    return [module for name, module in encoder.named_children() if name in _BEFORE_LAYERS]


def _learns(*modules: nn.Module, throughout: bool = False) -> bool:
    parameters: Iterable[nn.Parameter] = (p for module in modules for p in module.parameters())
    return (all if throughout else any)(p.requires_grad for p in parameters)
