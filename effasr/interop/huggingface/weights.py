"""Names of weights in transformers' models; see `effasr.interop.weights`."""

from __future__ import annotations

from effasr.interop.weights import Renames

_ENCODER = (
    ("encoder.subsampling.conv.", "encoder.subsampling.layers.0."),
    ("encoder.subsampling.depthwise1.", "encoder.subsampling.layers.2."),
    ("encoder.subsampling.pointwise1.", "encoder.subsampling.layers.3."),
    ("encoder.subsampling.depthwise2.", "encoder.subsampling.layers.5."),
    ("encoder.subsampling.pointwise2.", "encoder.subsampling.layers.6."),
    (".conv.pointwise1.", ".conv.pointwise_conv1."),
    (".conv.pointwise2.", ".conv.pointwise_conv2."),
    (".conv.depthwise.", ".conv.depthwise_conv."),
    (".self_attn.qkv_proj.", (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")),
)
PARAKEET: Renames = {
    "encoder.": _ENCODER,
    "ctc_head.": (),
    "transducer.": (
        ("transducer.encoder_projection.", "encoder_projector."),
        ("transducer.predictor_projection.", "decoder.decoder_projector."),
        ("transducer.predictor.embedding.", "decoder.embedding."),
        ("transducer.predictor.lstm.", "decoder.lstm."),
        ("transducer.output.", "joint.head."),
    ),
}
CANARY: Renames = {
    "encoder.": (*_ENCODER, ("encoder.", "model.encoder.")),
    "decoder.": (
        ("decoder.output_bias", "proj_out.bias"),
        ("decoder.untied_weight", "proj_out.weight"),
        ("decoder.", "model.decoder."),
        (".mlp.linear1.", ".mlp.fc1."),
        (".mlp.linear2.", ".mlp.fc2."),
        _ENCODER[-1],
        (".encoder_attn.kv_proj.", (".encoder_attn.k_proj.", ".encoder_attn.v_proj.")),
    ),
}

# Whisper's projections of keys have no bias.
_WHISPER_ATTENTION = (
    (
        ".self_attn.qkv_proj.weight",
        (".self_attn.q_proj.weight", ".self_attn.k_proj.weight", ".self_attn.v_proj.weight"),
    ),
    (".self_attn.qkv_proj.bias", (".self_attn.q_proj.bias", ".self_attn.v_proj.bias")),
    (
        ".encoder_attn.kv_proj.weight",
        (".encoder_attn.k_proj.weight", ".encoder_attn.v_proj.weight"),
    ),
    (".encoder_attn.kv_proj.bias", ".encoder_attn.v_proj.bias"),
    (".o_proj.", ".out_proj."),
    (".norm.", ".layer_norm."),
)
WHISPER: Renames = {
    "encoder.": (
        ("encoder.", "model.encoder."),
        (".stem.conv1.", ".conv1."),
        (".stem.conv2.", ".conv2."),
        (".norm_self_att.", ".self_attn_layer_norm."),
        (".norm_feed_forward.", ".final_layer_norm."),
        (".feed_forward.linear1.", ".fc1."),
        (".feed_forward.linear2.", ".fc2."),
        *_WHISPER_ATTENTION,
    ),
    "decoder.": (
        ("decoder.untied_weight", "proj_out.weight"),
        ("decoder.", "model.decoder."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".encoder_attn_layer_norm."),
        (".final_layernorm.", ".final_layer_norm."),
        (".mlp.linear1.", ".fc1."),
        (".mlp.linear2.", ".fc2."),
        *_WHISPER_ATTENTION,
    ),
}
