"""Names and shapes of weights: this project's on one side, NeMo's on the other.

The one difference of substance is the order of the decoder's channels. NeMo's position embeddings
have sine and cosine in turn, those here, and transformers', all sines and then all cosines. Every
weight that reads from or writes to the decoder's residual stream has its channels reordered, which
changes no bit of any weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Renames = Sequence[tuple[str, str | tuple[str, ...]]]

# Ours, NeMo's; one product here may be several there, in this order.
_ENCODER: Renames = (
    ("encoder.subsampling.conv.", "encoder.pre_encode.conv.0."),
    ("encoder.subsampling.depthwise1.", "encoder.pre_encode.conv.2."),
    ("encoder.subsampling.pointwise1.", "encoder.pre_encode.conv.3."),
    ("encoder.subsampling.depthwise2.", "encoder.pre_encode.conv.5."),
    ("encoder.subsampling.pointwise2.", "encoder.pre_encode.conv.6."),
    ("encoder.subsampling.linear.", "encoder.pre_encode.out."),
    (
        ".self_attn.qkv_proj.",
        (".self_attn.linear_q.", ".self_attn.linear_k.", ".self_attn.linear_v."),
    ),
    (".self_attn.o_proj.", ".self_attn.linear_out."),
    (".self_attn.relative_k_proj.", ".self_attn.linear_pos."),
    (".self_attn.bias_u", ".self_attn.pos_bias_u"),
    (".self_attn.bias_v", ".self_attn.pos_bias_v"),
    (".conv.pointwise1.", ".conv.pointwise_conv1."),
    (".conv.depthwise.", ".conv.depthwise_conv."),
    (".conv.norm.", ".conv.batch_norm."),
    (".conv.pointwise2.", ".conv.pointwise_conv2."),
)
_DECODER: Renames = (
    ("decoder.embed_tokens.", "transf_decoder._embedding.token_embedding."),
    ("decoder.embedding_layernorm.", "transf_decoder._embedding.layer_norm."),
    ("decoder.norm.", "transf_decoder._decoder.final_layer_norm."),
    ("decoder.output_bias", "log_softmax.mlp.layer0.bias"),
    ("decoder.layers.", "transf_decoder._decoder.layers."),
    (".input_layernorm.", ".layer_norm_1."),
    (
        ".self_attn.qkv_proj.",
        (".first_sub_layer.query_net.", ".first_sub_layer.key_net.", ".first_sub_layer.value_net."),
    ),
    (".self_attn.o_proj.", ".first_sub_layer.out_projection."),
    (".post_attention_layernorm.", ".layer_norm_2."),
    (".encoder_attn.q_proj.", ".second_sub_layer.query_net."),
    (".encoder_attn.kv_proj.", (".second_sub_layer.key_net.", ".second_sub_layer.value_net.")),
    (".encoder_attn.o_proj.", ".second_sub_layer.out_projection."),
    (".final_layernorm.", ".layer_norm_3."),
    (".mlp.linear1.", ".third_sub_layer.dense_in."),
    (".mlp.linear2.", ".third_sub_layer.dense_out."),
)
_PROJECTION: Renames = (("projection.", "encoder_decoder_proj."),)
_TRANSDUCER: Renames = (
    ("transducer.predictor.embedding.", "decoder.prediction.embed."),
    ("transducer.predictor.lstm.", "decoder.prediction.dec_rnn.lstm."),
    ("transducer.encoder_projection.", "joint.enc."),
    ("transducer.predictor_projection.", "joint.pred."),
    ("transducer.output.", "joint.joint_net.1."),
)
# With dropout in the joint network, its output layer is the third of it, not the second.
_AFTER_DROPOUT = "joint.joint_net.2.", "joint.joint_net.1."
_CTC: Renames = (("ctc_head.", "decoder.decoder_layers.0."),)
_AUX_CTC: Renames = (("ctc_head.", "ctc_decoder.decoder_layers.0."),)
_PARTS = (
    ("encoder.", _ENCODER),
    ("decoder.", _DECODER),
    ("projection.", _PROJECTION),
    ("transducer.", _TRANSDUCER),
)

# Linear layers over channels that NeMo keeps as convolutions of one tap.
_POINTWISE = re.compile(r"encoder\.layers\..*\.conv\.pointwise[12]\.weight|ctc_head\.weight")
_POINTWISE_2D = re.compile(r"encoder\.subsampling\.pointwise[12]\.weight")
_DEPTHWISE = re.compile(r"encoder\.layers\..*\.conv\.depthwise\.weight")

# Of the decoder's weights, those with the channels of the residual stream in rows or in columns.
_IN_ROWS = re.compile(
    r"decoder\.(.*norm\.|layers\.\d+\.(.*layernorm\.|(self|encoder)_attn\.o_proj\.|mlp\.linear2\.))"
    r"(weight|bias)"
)
_IN_COLUMNS = re.compile(
    r"decoder\.(embed_tokens|layers\.\d+\.(self_attn\.qkv|encoder_attn\.q)_proj"
    r"|layers\.\d+\.mlp\.linear1)\.weight"
)


def to_nemo(state: Mapping[str, Tensor], *, hybrid: bool) -> dict[str, Tensor]:
    """Rename, split and reshape weights as NeMo's models have them.

    Args:
        state: Parts of an `ASRModel` that one class of NeMo has.
        hybrid: Whether a CTC head is beside a transducer.

    Returns:
        Tensors that share no memory with one another.
    """
    theirs: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        if _POINTWISE.fullmatch(ours):
            tensor = tensor[..., None]
        elif _POINTWISE_2D.fullmatch(ours):
            tensor = tensor[..., None, None]
        elif _DEPTHWISE.fullmatch(ours):
            tensor = tensor[:, None]
        elif ours.startswith("decoder."):
            tensor = _reordered(ours, tensor, back=True)
        names = _names(ours, hybrid)
        pieces = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
        for name, piece in zip(names, pieces, strict=True):
            theirs[name] = piece.detach().cpu().clone(memory_format=torch.contiguous_format)
    return theirs


def from_nemo(
    state: Mapping[str, Tensor], names: Sequence[str], *, hybrid: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse of `to_nemo`; floating tensors become float32.

    Args:
        state: NeMo's weights.
        names: Those of our model; one of which a weight is missing is left out.
        hybrid: As there.

    Returns:
        Our weights, and those of NeMo's that are none of them.
    """
    ours: dict[str, Tensor] = {}
    rest = {name.replace(*_AFTER_DROPOUT): tensor for name, tensor in state.items()}
    for name in names:
        theirs = _names(name, hybrid)
        if any(part not in rest for part in theirs):
            continue
        pieces = [rest.pop(part) for part in theirs]
        tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if _POINTWISE.fullmatch(name):
            tensor = tensor[..., 0]
        elif _POINTWISE_2D.fullmatch(name):
            tensor = tensor[..., 0, 0]
        elif _DEPTHWISE.fullmatch(name):
            tensor = tensor[:, 0]
        elif name.startswith("decoder."):
            tensor = _reordered(name, tensor, back=False)
        ours[name] = tensor.float() if tensor.is_floating_point() else tensor
    return ours, rest


def _names(ours: str, hybrid: bool) -> list[str]:
    """NeMo's names of the pieces of a weight."""
    if ours.startswith("ctc_head."):
        renames = _AUX_CTC if hybrid else _CTC
    else:
        renames = next(table for prefix, table in _PARTS if ours.startswith(prefix))
    names = [ours]
    for mine, other in renames:
        if mine in ours:
            others = (other,) if isinstance(other, str) else other
            names = [name.replace(mine, one) for name in names for one in others]
    return names


def _reordered(name: str, tensor: Tensor, *, back: bool) -> Tensor:
    """NeMo's order of the residual stream as ours, or ``back``."""
    axis = 0 if _IN_ROWS.fullmatch(name) else 1 if _IN_COLUMNS.fullmatch(name) else None
    if axis is None:
        return tensor
    order = torch.arange(tensor.shape[axis])
    order = order.view(2, -1).T if back else order.view(-1, 2).T
    return tensor.index_select(axis, order.flatten().to(tensor.device))


def position_table(positions: int, width: int) -> Tensor:
    """NeMo's table of the decoder's positions, a buffer: float32 (positions, width)."""
    place = torch.arange(0.0, positions)[:, None]
    rates = torch.exp(-torch.arange(0.0, width, 2) * (torch.tensor(10_000.0).log() / width))
    angles = place * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) / width**0.5
