"""Supported values in each section of NeMo's configurations; see `effasr.interop.nemo.options`."""

from __future__ import annotations

import math
from typing import Any

from effasr.interop.nemo.options import Section, integer, number, one_of, only, switch

PREPROCESSOR = Section(
    defaults={
        "sample_rate": 16_000,
        "window_size": 0.02,
        "window_stride": 0.01,
        "n_window_size": None,
        "n_window_stride": None,
        "n_fft": None,
        "preemph": 0.97,
        "features": 64,
        "normalize": "per_feature",
    },
    fields={
        "sample_rate": ("sample_rate", integer),
        "mel_bins": ("features", integer),
        "preemphasis": ("preemph", number),
    },
    fixed={
        "window": only("hann"),
        "lowfreq": only(0, 0.0, None),
        "log": only(True),
        "log_zero_guard_type": only("add"),
        "log_zero_guard_value": (2.0**-24, lambda x: _close(x, 2.0**-24), "2 ** -24"),
        "frame_splicing": only(1),
        "exact_pad": only(False, None),
        "mag_power": only(2.0),
        "mel_norm": only("slaney"),
    },
    training={"nb_augmentation_prob": 0},
    # Features have no rows beyond the utterance in effasr, so the padding value does not matter.
    ignored=(
        "dither pad_to pad_value rng nb_max_freq highfreq use_torchaudio stft_exact_pad stft_conv"
    ),
    classes=("AudioToMelSpectrogramPreprocessor",),
)
ENCODER = Section(
    defaults={
        "feat_in": None,
        "n_layers": None,
        "d_model": None,
        "feat_out": -1,
        "subsampling_factor": 4,
        "subsampling_conv_channels": -1,
        "causal_downsampling": False,
        "ff_expansion_factor": 4,
        "n_heads": 4,
        "xscaling": True,
        "untie_biases": True,
        "conv_kernel_size": 31,
        "conv_context_size": None,
        "att_context_size": None,
        "att_context_style": "regular",
        "conv_norm_type": "batch_norm",
        "use_bias": True,
        "dropout": 0.1,
        "dropout_pre_encoder": 0.1,
        "dropout_emb": 0.1,
        "dropout_att": 0.0,
        "reduction": None,
        "reduction_factor": 1,
    },
    fields={
        "width": ("d_model", integer),
        "layers": ("n_layers", integer),
        "heads": ("n_heads", integer),
        "conv_kernel": ("conv_kernel_size", integer),
        "subsampling": ("subsampling_factor", one_of(4, 8)),
        "subsampling_channels": ("subsampling_conv_channels", integer),
        "causal_subsampling": ("causal_downsampling", switch),
        "scale_input": ("xscaling", switch),
        "bias": ("use_bias", switch),
        "input_dropout": ("dropout_pre_encoder", number),
        "residual_dropout": ("dropout", number),
        "attention_dropout": ("dropout_att", number),
        "position_dropout": ("dropout_emb", number),
    },
    fixed={
        "subsampling": only("dw_striding", default="striding"),
        "self_attention_model": only("rel_pos"),
        "att_chunk_context_size": (None, lambda size: size is None, "null"),
        "conv_context_style": only("regular"),
    },
    training={
        "stochastic_depth_drop_prob": 0.0,
        "conv_dual_mode": False,
        "att_context_probs": None,
    },
    ignored=(
        "subsampling_conv_chunking_factor reduction_position pos_emb_max_len "
        "stochastic_depth_mode stochastic_depth_start_layer "
        "global_tokens global_tokens_spacing global_attn_separate use_pytorch_sdpa "
        "use_pytorch_sdpa_backends sync_max_audio_length"
    ),
    classes=("ConformerEncoder",),
)
CTC = Section(
    defaults={},
    fixed={"add_blank": only(True)},
    ignored="feat_in num_classes vocabulary init_mode",
    classes=("ConvASRDecoder",),
)
PREDICTOR = Section(
    defaults={"prednet": None},
    fixed={"normalization_mode": only(None), "blank_as_pad": only(True)},
    training={"random_state_sampling": False},
    ignored="vocab_size",
    classes=("RNNTDecoder",),
)
PREDNET = Section(
    defaults={"pred_hidden": None, "pred_rnn_layers": None, "dropout": 0.0, "rnn_hidden_size": -1},
    fields={
        "width": ("pred_hidden", integer),
        "layers": ("pred_rnn_layers", integer),
        "dropout": ("dropout", number),
    },
    ignored="forget_gate_bias t_max weights_init_scale hidden_hidden_bias_scale",
)
JOINT = Section(
    defaults={"jointnet": None, "num_extra_outputs": 0},
    training={"masking_prob": -1.0},
    ignored=(
        "num_classes vocabulary log_softmax preserve_memory fuse_loss_wer "
        "fused_batch_size experimental_fuse_loss_wer"
    ),
    classes=("RNNTJoint",),
)
JOINTNET = Section(
    defaults={"joint_hidden": None, "activation": "relu"},
    training={"dropout": 0.0},
    ignored="encoder_hidden pred_hidden",
)
DECODER = Section(
    defaults={"config_dict": None},
    fixed={
        "model_name": only(None),
        "pretrained": only(False, None),
        "encoder": only(None, False, default=True),
        "pre_ln_final_layer_norm": only(True),
        "library": only("nemo", None),
    },
    classes=("get_nemo_transformer",),
)
DECODER_LAYERS = Section(
    defaults={
        "hidden_size": None,
        "inner_size": None,
        "num_layers": None,
        "num_attention_heads": None,
        "max_sequence_length": 512,
        "embedding_dropout": 0.0,
        "attn_score_dropout": 0.0,
        "attn_layer_dropout": 0.0,
        "ffn_dropout": 0.0,
    },
    fields={
        "width": ("hidden_size", integer),
        "layers": ("num_layers", integer),
        "heads": ("num_attention_heads", integer),
        "feed_forward": ("inner_size", integer),
        "max_positions": ("max_sequence_length", integer),
        "input_dropout": ("embedding_dropout", number),
        "residual_dropout": ("attn_layer_dropout", number),
        "attention_dropout": ("attn_score_dropout", number),
    },
    fixed={
        "learn_positional_encodings": only(False),
        "hidden_act": only("relu"),
        "pre_ln": only(True, default=False),
    },
    # The decoder never receives token types.
    ignored="num_token_types vocab_size pre_ln_final_layer_norm",
)
HEAD = Section(
    defaults={},
    fixed={"num_layers": only(1)},
    training={"dropout": 0.0},
    ignored="hidden_size num_classes activation log_softmax use_transformer_init",
    classes=("TokenClassifier",),
)
AUGMENT = Section(
    defaults={"freq_masks": 0, "time_masks": 0, "freq_width": 10, "time_width": 10},
    training={"rect_masks": 0, "mask_value": 0.0},
    ignored="rect_time rect_freq rng use_numba_spec_augment use_vectorized_spec_augment",
    classes=("SpectrogramAugmentation",),
)
RNNT_LOSSES = ("default", "warprnnt", "warprnnt_numba", "pytorch", "graph_rnnt")
TDT_LOSSES = ("tdt", "tdt_pytorch")


def _close(value: Any, expected: float) -> bool:
    return isinstance(value, float) and math.isclose(value, expected, rel_tol=1e-6)
