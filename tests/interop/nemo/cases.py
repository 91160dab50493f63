"""NeMo's configurations of the tiny models that `make.py` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
from nemo.collections.asr import models  # pyright: ignore[reportMissingImports]
from nemo.collections.common.tokenizers.canary_tokenizer import (  # pyright: ignore[reportMissingImports]
    CanaryTokenizer,
)

_WIDTH, _BINS = 16, 8
_PREPROCESSOR = {
    "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "sample_rate": 16000,
    "normalize": "per_feature",
    "window_size": 0.025,
    "window_stride": 0.01,
    "window": "hann",
    "features": _BINS,
    "n_fft": 512,
    "frame_splicing": 1,
    "dither": 0.0,
    "pad_to": 0,
}
_CORPUS = {
    "en": ["the red dog ran to the barn", "a cat and a dog", "go home now", "it is the end"],
    "de": ["der rote hund lief zum haus", "das ist ein haus", "geh heim", "und der hund"],
}
_SPECIALS = ["translate", "transcribe", "en", "de", "fr"]
_SPECIALS2 = [
    *("<|startofcontext|>", "<|emo:undefined|>", "<|itn|>", "<|noitn|>", "<|timestamp|>"),
    *("<|notimestamp|>", "<|diarize|>", "<|nodiarize|>", "<|en|>", "<|de|>", "<|fr|>"),
]
_DEFAULTS = [
    *("<|nospeech|>", "<pad>", "<|endoftext|>", "<|startoftranscript|>", "<|pnc|>", "<|nopnc|>")
]


def train(folder: Path, texts: list[str], pieces: int, symbols: list[str] | None = None) -> str:
    """Train a SentencePiece model as NeMo's own script lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=pieces,
        model_type="bpe",
        normalization_rule_name="identity",  # The usual rules are 230 kB.
        user_defined_symbols=symbols or [],
        bos_id=-1,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    lines = (folder / "tokenizer.vocab").read_text().splitlines()
    (folder / "vocab.txt").write_text("\n".join(line.split("\t")[0] for line in lines) + "\n")
    return str(folder)


def tokenizer(kind: str, folder: Path) -> dict[str, Any]:
    """The section of a configuration, and its files."""
    both = _CORPUS["en"] + _CORPUS["de"]
    if kind == "bpe":
        return {"type": "bpe", "dir": train(folder / "bpe", _CORPUS["en"], 32)}
    canary = "nemo.collections.common.tokenizers.canary_tokenizer."
    if kind == "unified":
        symbols = _DEFAULTS + _SPECIALS2
        target = {"_target_": canary + "CanaryBPETokenizer", "model_path": None}
        directory = train(folder / "unified", both, 56, symbols)
        return {"type": "bpe", "dir": directory, "custom_tokenizer": target}
    langs = {
        name: {"type": "bpe", "dir": train(folder / kind / name, _CORPUS[name], 22 + size)}
        for name, size in (("en", 0), ("de", 3))
    }
    if kind == "agg":
        return {"type": "agg", "langs": langs}
    special = folder / kind / "spl_tokens"
    CanaryTokenizer.build_special_tokenizer(
        _SPECIALS if kind == "canary" else _SPECIALS2, special, force_rebuild=False
    )
    _shrink(special)
    langs = {"spl_tokens": {"type": "bpe", "dir": str(special)}, **langs}
    target = {"_target_": canary + "CanaryTokenizer", "tokenizers": None}
    return {"type": "agg", "dir": None, "langs": langs, "custom_tokenizer": target}


def _shrink(folder: Path) -> None:
    """Leave the rules of normalisation out of a model of special tokens, which are not applied."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((folder / "tokenizer.model").read_bytes())
    model.normalizer_spec.precompiled_charsmap = b""
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


def encoder(**options: Any) -> dict[str, Any]:
    """FastConformer, as NeMo's example configurations write it, but small."""
    return {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": _BINS,
        "feat_out": -1,
        "n_layers": 1,
        "d_model": _WIDTH,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": 6,
        "causal_downsampling": False,
        "reduction": None,
        "reduction_position": None,
        "reduction_factor": 1,
        "ff_expansion_factor": 2,
        "self_attention_model": "rel_pos",
        "n_heads": 2,
        "att_context_size": [-1, -1],
        "att_context_style": "regular",
        "xscaling": False,
        "untie_biases": True,
        "pos_emb_max_len": 100,
        "conv_kernel_size": 5,
        "conv_norm_type": "batch_norm",
        "conv_context_size": None,
        "dropout": 0.1,
        "dropout_pre_encoder": 0.05,
        "dropout_emb": 0.02,
        "dropout_att": 0.15,
        **options,
    }


def base(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    """What all classes have."""
    return {
        "sample_rate": 16000,
        "log_prediction": False,
        "tokenizer": tokenizer(kind, folder),
        "preprocessor": _PREPROCESSOR,
        "spec_augment": {
            "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
            "freq_masks": 2,
            "time_masks": 10,
            "freq_width": 3,
            "time_width": 0.05,
        },
        "optim": {"name": "adamw", "lr": 1e-3},
        **options,
    }


def ctc(folder: Path) -> dict[str, Any]:
    """No biases, LayerNorm in the convolution module, scaled input."""
    return base(
        folder,
        "bpe",
        encoder=encoder(use_bias=False, conv_norm_type="layer_norm", xscaling=True, n_layers=2),
        decoder=_ctc_head(),
    )


def _ctc_head() -> dict[str, Any]:
    target = "nemo.collections.asr.modules.ConvASRDecoder"
    return {"_target_": target, "feat_in": None, "num_classes": -1, "vocabulary": []}


def rnnt(folder: Path) -> dict[str, Any]:
    """An aggregate tokenizer, two layers of LSTM, tanh."""
    return base(folder, "agg", encoder=encoder(), **_transducer(20, layers=2, activation="tanh"))


def hybrid(folder: Path) -> dict[str, Any]:
    """A TDT with a CTC head beside it."""
    aux = {"decoder": _ctc_head(), "ctc_loss_weight": 0.3, "decoding": {"strategy": "greedy"}}
    transducer = _transducer(12, durations=[0, 1, 2, 3])
    return base(folder, "bpe", encoder=encoder(use_bias=True), aux_ctc=aux, **transducer)


def _transducer(
    joint: int, layers: int = 1, activation: str = "relu", durations: list[int] | None = None
) -> dict[str, Any]:
    extra = {"tdt_durations": durations, "num_tdt_durations": len(durations)} if durations else {}
    tdt = {"durations": durations, "sigma": 0.02, "omega": 0.1, "fastemit_lambda": 0.0}
    numba = {"fastemit_lambda": 0.005, "clamp": -1.0}
    return {
        "model_defaults": {"enc_hidden": _WIDTH, "pred_hidden": 12, "joint_hidden": joint, **extra},
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {
                "pred_hidden": 12,
                "pred_rnn_layers": layers,
                "t_max": None,
                "dropout": 0.2,
            },
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": False,
            "jointnet": {"joint_hidden": joint, "activation": activation, "dropout": 0.2},
            **({"num_extra_outputs": len(durations)} if durations else {}),
        },
        "decoding": {
            "strategy": "greedy_batch",
            "greedy": {"max_symbols": 10},
            **({"model_type": "tdt", "durations": durations} if durations else {}),
        },
        "loss": (
            {"loss_name": "tdt", "tdt_kwargs": tdt}
            if durations
            else {"loss_name": "default", "warprnnt_numba_kwargs": numba}
        ),
    }


def streaming_ctc(folder: Path) -> dict[str, Any]:
    """A cache-aware encoder of two contexts, as NeMo's fastconformer_ctc_bpe_streaming."""
    config = ctc(folder)
    return {**config, **_cache_aware("layer_norm", 2, [[4, 1], [6, 2]])}


def streaming_hybrid(folder: Path) -> dict[str, Any]:
    """An RNN-T with a CTC head; one of the contexts looks at no later frame."""
    aux = {"decoder": _ctc_head(), "ctc_loss_weight": 0.3, "decoding": {"strategy": "greedy"}}
    parts = {**_cache_aware("batch_norm", 1, [[9, 2], [4, 0]]), **_transducer(12)}
    return base(folder, "bpe", aux_ctc=aux, **parts)


def _cache_aware(norm: str, layers: int, sizes: list[list[int]]) -> dict[str, Any]:
    """Encoder and preprocessor of NeMo's cache-aware configurations."""
    options = {
        "causal_downsampling": True,
        "att_context_size": sizes,
        "att_context_style": "chunked_limited",
        "conv_norm_type": norm,
        "conv_context_size": "causal",
        "n_layers": layers,
    }
    return {"encoder": encoder(**options), "preprocessor": {**_PREPROCESSOR, "normalize": "NA"}}


def canary(folder: Path) -> dict[str, Any]:
    """canary-1b's tokenizer and prompt; a decoder narrower than the encoder; a class to spare."""
    return _multitask(folder, "canary", "canary", width=12, layers=2)


def flash(folder: Path) -> dict[str, Any]:
    """canary-1b-flash's tokenizer and prompt."""
    defaults = {"source_lang": "<|de|>", "target_lang": "<|de|>", "pnc": "<|nopnc|>"}
    config = _multitask(folder, "canary2", "canary2", width=_WIDTH, layers=1)
    return {**config, "prompt_defaults": [{"role": "user", "slots": defaults}]}


def unified(folder: Path) -> dict[str, Any]:
    """canary-1b-v2's tokenizer."""
    return _multitask(folder, "unified", "canary2", width=_WIDTH, layers=1)


def _multitask(folder: Path, kind: str, prompt: str, width: int, layers: int) -> dict[str, Any]:
    return base(
        folder,
        kind,
        prompt_format=prompt,
        label_smoothing=0.0,
        model_defaults={"asr_enc_hidden": _WIDTH, "lm_enc_hidden": width, "lm_dec_hidden": width},
        encoder=encoder(),
        transf_encoder={
            "_target_": "nemo.collections.asr.modules.transformer.transformer_encoders."
            "WhisperEncoder",
            "num_layers": 0,
            "hidden_size": width,
            "inner_size": 4 * width,
            "num_attention_heads": 2,
        },
        transf_decoder={
            "_target_": "nemo.collections.asr.modules.transformer.get_nemo_transformer",
            "model_name": None,
            "pretrained": False,
            "encoder": None,
            "pre_ln_final_layer_norm": True,
            "config_dict": {
                "max_sequence_length": 64,
                "num_token_types": 0,
                "embedding_dropout": 0.1,
                "learn_positional_encodings": False,
                "hidden_size": width,
                "inner_size": 3 * width,
                "num_layers": layers,
                "num_attention_heads": 2,
                "ffn_dropout": 0.2,
                "attn_score_dropout": 0.15,
                "attn_layer_dropout": 0.2,
                "hidden_act": "relu",
                "pre_ln": True,
                "vocab_size": None,
            },
        },
        head={
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier",
            "num_layers": 1,
            "activation": "relu",
            "log_softmax": True,
            "hidden_size": width,
            "num_classes": None,
            "dropout": 0.0,
            "use_transformer_init": True,
        },
        decoding={
            "strategy": "beam",
            "return_best_hypothesis": True,
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 20},
        },
        loss={
            "_target_": "nemo.collections.common.losses.smoothed_cross_entropy."
            "SmoothedCrossEntropyLoss",
            "label_smoothing": 0.0,
            "pad_id": None,
        },
    )


CASES = {
    "ctc": (models.EncDecCTCModelBPE, ctc),
    "rnnt": (models.EncDecRNNTBPEModel, rnnt),
    "hybrid": (models.EncDecHybridRNNTCTCBPEModel, hybrid),
    "streaming_ctc": (models.EncDecCTCModelBPE, streaming_ctc),
    "streaming_hybrid": (models.EncDecHybridRNNTCTCBPEModel, streaming_hybrid),
    "canary": (models.EncDecMultiTaskModel, canary),
    "flash": (models.EncDecMultiTaskModel, flash),
    "unified": (models.EncDecMultiTaskModel, unified),
}
