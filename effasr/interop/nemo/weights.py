"""Names of weights in NeMo's models, and the order of their channels.

NeMo's position embeddings of the decoder interleave sines and cosines; those here, and in
transformers, have all sines and then all cosines. So every weight that reads from or writes to the
decoder's residual stream has its channels reordered, which changes no bit of any weight.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from effasr.interop.weights import Renames

_ENCODER = (
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
_DECODER = (
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
_TRANSDUCER = (
    ("transducer.predictor.embedding.", "decoder.prediction.embed."),
    ("transducer.predictor.lstm.", "decoder.prediction.dec_rnn.lstm."),
    ("transducer.encoder_projection.", "joint.enc."),
    ("transducer.predictor_projection.", "joint.pred."),
    ("transducer.output.", "joint.joint_net.1."),
)
AFTER_DROPOUT = "joint.joint_net.2.", "joint.joint_net.1."
"""The output layer of a joint network with dropout, and without."""


def renames(*, hybrid: bool) -> Renames:
    """Our names and NeMo's.

    Args:
        hybrid: Whether the model has a CTC head and a transducer.
    """
    ctc = "ctc_decoder" if hybrid else "decoder"
    return {
        "encoder.": _ENCODER,
        "decoder.": _DECODER,
        "projection.": (("projection.", "encoder_decoder_proj."),),
        "transducer.": _TRANSDUCER,
        "ctc_head.": (("ctc_head.", f"{ctc}.decoder_layers.0."),),
    }


# Decoder weights with the channels of the residual stream as rows, or as columns.
_IN_ROWS = re.compile(
    r"decoder\.(.*norm\.|layers\.\d+\.(.*layernorm\.|(self|encoder)_attn\.o_proj\.|mlp\.linear2\.))"
    r"(weight|bias)"
)
_IN_COLUMNS = re.compile(
    r"decoder\.(embed_tokens|layers\.\d+\.(self_attn\.qkv|encoder_attn\.q)_proj"
    r"|layers\.\d+\.mlp\.linear1)\.weight"
)


def _reordered(name: str, tensor: Tensor, *, to_nemo: bool) -> Tensor:
    """Return a weight with the residual stream in NeMo's order of channels, or in ours."""
    axis = 0 if _IN_ROWS.fullmatch(name) else 1 if _IN_COLUMNS.fullmatch(name) else None
    if axis is None:
        return tensor
    order = torch.arange(tensor.shape[axis])
    order = order.view(2, -1).T if to_nemo else order.view(-1, 2).T
    return tensor.index_select(axis, order.flatten().to(tensor.device))


to_nemo_order = partial(_reordered, to_nemo=True)
from_nemo_order = partial(_reordered, to_nemo=False)


def position_table(positions: int, width: int) -> Tensor:
    """NeMo's table of the decoder's positions, a buffer: float32 (positions, width)."""
    place = torch.arange(0.0, positions)[:, None]
    rates = torch.exp(-torch.arange(0.0, width, 2) * (torch.tensor(10_000.0).log() / width))
    angles = place * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) / width**0.5
