"""Names and shapes of weights: this project's on one side, transformers' on the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_RENAMED = (
    ("encoder.subsampling.conv.", "encoder.subsampling.layers.0."),
    ("encoder.subsampling.depthwise1.", "encoder.subsampling.layers.2."),
    ("encoder.subsampling.pointwise1.", "encoder.subsampling.layers.3."),
    ("encoder.subsampling.depthwise2.", "encoder.subsampling.layers.5."),
    ("encoder.subsampling.pointwise2.", "encoder.subsampling.layers.6."),
    (".conv.pointwise1.", ".conv.pointwise_conv1."),
    (".conv.pointwise2.", ".conv.pointwise_conv2."),
    (".conv.depthwise.", ".conv.depthwise_conv."),
    (".mlp.linear1.", ".mlp.fc1."),
    (".mlp.linear2.", ".mlp.fc2."),
    # The transducer's; its predictor shares the name `decoder` with the layers of Canary's decoder.
    ("transducer.encoder_projection.", "encoder_projector."),
    ("transducer.predictor_projection.", "decoder.decoder_projector."),
    ("transducer.predictor.embedding.", "decoder.embedding."),
    ("transducer.predictor.lstm.", "decoder.lstm."),
    ("transducer.output.", "joint.head."),
    ("decoder.output_bias", "proj_out.bias"),
    ("decoder.untied_weight", "proj_out.weight"),
)

# One product here is several there, in this order.
_FUSED = (
    (".self_attn.qkv_proj.", (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")),
    (".encoder_attn.kv_proj.", (".encoder_attn.k_proj.", ".encoder_attn.v_proj.")),
)

# Linear layers over channels that transformers keeps as convolutions of one tap.
_POINTWISE = (".conv.pointwise_conv1.weight", ".conv.pointwise_conv2.weight", "ctc_head.weight")
_POINTWISE_2D = (".subsampling.layers.3.weight", ".subsampling.layers.6.weight")
_DEPTHWISE = ".conv.depthwise_conv.weight"


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename, split and reshape weights, or their gradients, as transformers' models have them.

    Args:
        state: Of an `ASRModel` without a projection.

    Returns:
        Tensors that share no memory with one another: for ``CanaryForConditionalGeneration``
        where ``state`` has a decoder; else for ``ParakeetForRNNT`` or ``ParakeetForTDT`` where it
        has a transducer, and for ``ParakeetForCTC`` where it has a CTC head.
    """
    prefix = "model." if any(name.startswith("decoder.") for name in state) else ""
    theirs = {}
    for ours, tensor in state.items():
        name = ours
        for mine, other in _RENAMED:
            name = name.replace(mine, other)
        if name.endswith(_POINTWISE):
            tensor = tensor[..., None]
        elif name.endswith(_POINTWISE_2D):
            tensor = tensor[..., None, None]
        elif name.endswith(_DEPTHWISE):
            tensor = tensor[:, None]
        if name.startswith(("encoder.", "decoder.")):
            name = prefix + name
        for part, piece in _split(name, tensor).items():
            theirs[part] = piece.clone(memory_format=torch.contiguous_format)
    return theirs


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_transformers`; floating tensors become float32."""
    ours: dict[str, Tensor] = {}
    for theirs, tensor in state.items():
        name = theirs.removeprefix("model.")
        if name.endswith(_POINTWISE):
            tensor = tensor[..., 0]
        elif name.endswith(_POINTWISE_2D):
            tensor = tensor[..., 0, 0]
        elif name.endswith(_DEPTHWISE):
            tensor = tensor[:, 0]
        for mine, other in _RENAMED:
            name = name.replace(other, mine)
        ours[name] = tensor.float() if tensor.is_floating_point() else tensor
    return _fuse(ours)


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    for fused, parts in _FUSED:
        if fused in name:
            names = [name.replace(fused, part) for part in parts]
            return dict(zip(names, tensor.chunk(len(parts)), strict=True))
    return {name: tensor}


def _fuse(state: dict[str, Tensor]) -> dict[str, Tensor]:
    fused_state = dict(state)
    for name in state:
        for fused, parts in _FUSED:
            names = [name.replace(parts[0], part) for part in parts]
            if parts[0] in name and all(part in state for part in names):
                pieces = [fused_state.pop(part) for part in names]
                fused_state[name.replace(parts[0], fused)] = torch.cat(pieces)
    return fused_state
