"""Sections of NeMo's configurations, and names and channel order of weights, as tables.

NeMo's position embeddings of the decoder interleave sines and cosines; those here, and in
transformers, have all sines and then all cosines. So every weight that reads from or writes to the
decoder's residual stream has its channels reordered, which changes no bit of any weight.
"""

import math
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effasr.interop.tables import Renames, Section, integer, number, one_of, only, switch

_MODULES = "nemo.collections.asr.modules."

PREPROCESSOR = Section(
    fields={
        "sample_rate": ("sample_rate", 16_000, integer),
        "mel_bins": ("features", 64, integer),
        "preemphasis": ("preemph", 0.97, number),
    },
    options={
        "window_size": 0.02,
        "window_stride": 0.01,
        "n_window_size": None,
        "n_window_stride": None,
        "n_fft": None,
        "normalize": "per_feature",
    },
    constants={"window": "hann", "log": True, "frame_splicing": 1},
    fixed={
        "lowfreq": only(0, 0.0, None),
        "log_zero_guard_type": only("add"),
        "log_zero_guard_value": (2.0**-24, lambda x: _close(x, 2.0**-24), "2 ** -24"),
        "exact_pad": only(False, None),
        "mag_power": only(2.0),
        "mel_norm": only("slaney"),
    },
    training={"nb_augmentation_prob": 0},
    # Features have no rows beyond the utterance in effasr, so the padding value does not matter.
    written={"dither": 1e-5, "pad_to": 0, "pad_value": 0.0},
    ignored="rng nb_max_freq highfreq use_torchaudio stft_exact_pad stft_conv",
    target=f"{_MODULES}AudioToMelSpectrogramPreprocessor",
)
ENCODER = Section(
    fields={
        "width": ("d_model", None, integer),
        "layers": ("n_layers", None, integer),
        "heads": ("n_heads", 4, integer),
        "conv_kernel": ("conv_kernel_size", 31, integer),
        "conv_norm": ("conv_norm_type", "batch_norm", one_of("batch_norm", "layer_norm")),
        "subsampling": ("subsampling_factor", 4, one_of(4, 8)),
        "subsampling_channels": ("subsampling_conv_channels", -1, integer),
        "causal_subsampling": ("causal_downsampling", False, switch),
        "scale_input": ("xscaling", True, switch),
        "bias": ("use_bias", True, switch),
        "input_dropout": ("dropout_pre_encoder", 0.1, number),
        "residual_dropout": ("dropout", 0.1, number),
        "attention_dropout": ("dropout_att", 0.0, number),
        "position_dropout": ("dropout_emb", 0.1, number),
    },
    options={
        "feat_in": None,
        "feat_out": -1,
        "ff_expansion_factor": 4,
        "untie_biases": True,
        "conv_context_size": None,
        "att_context_size": None,
        "att_context_style": "regular",
        "reduction": None,
        "reduction_factor": 1,
    },
    constants={"self_attention_model": "rel_pos"},
    fixed={
        "subsampling": only("dw_striding", default="striding"),
        "att_chunk_context_size": (None, lambda size: size is None, "null"),
        "conv_context_style": only("regular"),
    },
    training={
        "stochastic_depth_drop_prob": 0.0,
        "conv_dual_mode": False,
        "att_context_probs": None,
    },
    written={
        "subsampling": "dw_striding",
        "feat_out": -1,
        "reduction": None,
        "reduction_position": None,
        "reduction_factor": 1,
        "untie_biases": True,
        "pos_emb_max_len": 5000,  # The initial length of NeMo's position table, which grows.
        "stochastic_depth_drop_prob": 0.0,
        "stochastic_depth_mode": "linear",
        "stochastic_depth_start_layer": 1,
    },
    ignored=(
        "subsampling_conv_chunking_factor global_tokens global_tokens_spacing "
        "global_attn_separate use_pytorch_sdpa use_pytorch_sdpa_backends sync_max_audio_length"
    ),
    target=f"{_MODULES}ConformerEncoder",
)
CTC = Section(
    fixed={"add_blank": only(True)},
    ignored="feat_in num_classes vocabulary init_mode",
    target=f"{_MODULES}ConvASRDecoder",
)
PREDICTOR = Section(
    options={"prednet": None},
    constants={"normalization_mode": None, "blank_as_pad": True},
    training={"random_state_sampling": False},
    written={"random_state_sampling": False},
    ignored="vocab_size",
    target=f"{_MODULES}RNNTDecoder",
)
PREDNET = Section(
    fields={
        "width": ("pred_hidden", None, integer),
        "layers": ("pred_rnn_layers", None, integer),
        "dropout": ("dropout", 0.0, number),
    },
    options={"rnn_hidden_size": -1},
    written={"t_max": None},
    ignored="forget_gate_bias weights_init_scale hidden_hidden_bias_scale",
)
JOINT = Section(
    options={"jointnet": None, "num_extra_outputs": 0},
    training={"masking_prob": -1.0},
    written={
        "log_softmax": None,
        "preserve_memory": False,
        "fuse_loss_wer": True,
        "fused_batch_size": 4,
    },
    ignored="num_classes vocabulary experimental_fuse_loss_wer",
    target=f"{_MODULES}RNNTJoint",
)
JOINTNET = Section(
    fields={"joint": ("joint_hidden", None, integer)},
    options={"activation": "relu"},
    training={"dropout": 0.0},
    written={"dropout": 0.0},
    ignored="encoder_hidden pred_hidden",
)
DECODER = Section(
    options={"config_dict": None},
    constants={"model_name": None, "pre_ln_final_layer_norm": True},
    fixed={
        "pretrained": only(False, None),
        "encoder": only(None, False, default=True),
        "library": only("nemo", None),
    },
    written={"pretrained": False, "encoder": None},
    ignored="",
    target=f"{_MODULES}transformer.get_nemo_transformer",
)
DECODER_LAYERS = Section(
    fields={
        "width": ("hidden_size", None, integer),
        "layers": ("num_layers", None, integer),
        "heads": ("num_attention_heads", None, integer),
        "feed_forward": ("inner_size", None, integer),
        "max_positions": ("max_sequence_length", 512, integer),
        "input_dropout": ("embedding_dropout", 0.0, number),
        "residual_dropout": ("attn_layer_dropout", 0.0, number),
        "attention_dropout": ("attn_score_dropout", 0.0, number),
    },
    options={"ffn_dropout": 0.0},
    constants={"learn_positional_encodings": False, "hidden_act": "relu"},
    fixed={"pre_ln": only(True, default=False)},
    # The decoder never receives token types.
    written={"pre_ln": True, "num_token_types": 0},
    ignored="vocab_size pre_ln_final_layer_norm",
)
HEAD = Section(
    constants={"num_layers": 1},
    training={"dropout": 0.0},
    written={
        "activation": "relu",
        "log_softmax": True,
        "dropout": 0.0,
        "use_transformer_init": True,
    },
    ignored="hidden_size num_classes",
    target="nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier",
)
AUGMENT = Section(
    fields={
        "freq_masks": ("freq_masks", 0, integer),
        "time_masks": ("time_masks", 0, integer),
        "freq_width": ("freq_width", 10, integer),
        "time_width": ("time_width", 10),
    },
    training={"rect_masks": 0, "mask_value": 0.0},
    ignored="rect_time rect_freq rng use_numba_spec_augment use_vectorized_spec_augment",
    target=f"{_MODULES}SpectrogramAugmentation",
)
RNNT_LOSSES = ("default", "warprnnt", "warprnnt_numba", "pytorch", "graph_rnnt")
TDT_LOSSES = ("tdt", "tdt_pytorch")


def _close(value: Any, expected: float) -> bool:
    return isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-6)


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
    """Our names and NeMo's; a hybrid has a CTC head and a transducer."""
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
    position = torch.arange(0.0, positions)[:, None]
    rates = torch.exp(-torch.arange(0.0, width, 2) * (torch.tensor(10_000.0).log() / width))
    angles = position * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1) / width**0.5
