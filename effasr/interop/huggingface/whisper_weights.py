"""Names and shapes of Whisper's weights: this project's on one side, transformers' on the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Parts of names, here and there.
_RENAMED = {
    "encoder": (
        ("stem.conv1", "conv1"),
        ("stem.conv2", "conv2"),
        ("norm_self_att", "self_attn_layer_norm"),
        ("norm_feed_forward", "final_layer_norm"),
        ("feed_forward.linear1", "fc1"),
        ("feed_forward.linear2", "fc2"),
        ("o_proj", "out_proj"),
        ("norm", "layer_norm"),
    ),
    "decoder": (
        ("input_layernorm", "self_attn_layer_norm"),
        ("post_attention_layernorm", "encoder_attn_layer_norm"),
        ("final_layernorm", "final_layer_norm"),
        ("mlp.linear1", "fc1"),
        ("mlp.linear2", "fc2"),
        ("o_proj", "out_proj"),
        ("norm", "layer_norm"),
    ),
}
# One product here is several there, in this order; keys have no bias.
_JOINED = (
    ("self_attn.qkv_proj.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    ("self_attn.qkv_proj.bias", ("q_proj.bias", "v_proj.bias")),
    ("encoder_attn.kv_proj.weight", ("k_proj.weight", "v_proj.weight")),
    ("encoder_attn.kv_proj.bias", ("v_proj.bias",)),
)
OUTPUT_WEIGHT = "proj_out.weight"
"""Of the output layer; a copy of the embedding where they are tied."""

_UNTIED = "decoder.untied_weight"


def to_whisper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split weights, or their gradients, as transformers' model has them.

    Args:
        state: Of the encoder and the decoder of an `ASRModel`.

    Returns:
        Tensors that share no memory with one another, without the table of the encoder's places
        where that is computed.
    """
    theirs: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        if ours == _UNTIED:
            theirs[OUTPUT_WEIGHT] = tensor.clone()
            continue
        name = ours
        for mine, other in _RENAMED[ours.partition(".")[0]]:
            name = name.replace(f".{mine}.", f".{other}.")
        pieces = {name: tensor}
        for joined, parts in _JOINED:
            if name.endswith(joined):
                head = name.removesuffix(joined) + joined.partition(".")[0]
                names = [f"{head}.{part}" for part in parts]
                pieces = dict(zip(names, tensor.chunk(len(parts)), strict=True))
        for part, piece in pieces.items():
            theirs[f"model.{part}"] = piece.clone(memory_format=torch.contiguous_format)
    return theirs


def from_whisper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_whisper`; floating tensors become float32."""
    left = {name.removeprefix("model."): tensor.float() for name, tensor in state.items()}
    for joined, parts in _JOINED:
        attention = joined.partition(".")[0]
        for name in [name for name in left if name.endswith(f"{attention}.{parts[-1]}")]:
            head = name.removesuffix(f"{attention}.{parts[-1]}")
            names = [f"{head}{attention}.{part}" for part in parts]
            if all(part in left for part in names):
                left[head + joined] = torch.cat([left.pop(part) for part in names])
    ours = {}
    for theirs, tensor in left.items():
        name = theirs
        for mine, other in _RENAMED.get(theirs.partition(".")[0], ()):
            name = name.replace(f".{other}.", f".{mine}.")
        ours[_UNTIED if theirs == OUTPUT_WEIGHT else name] = tensor
    return ours
