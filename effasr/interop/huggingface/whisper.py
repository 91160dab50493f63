"""Checkpoints of ``WhisperForConditionalGeneration``, such as openai/whisper-small's."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from effasr.interop.export_checks import warn_about_parts
from effasr.interop.huggingface.files import (
    read_config,
    read_generation,
    read_preprocessor,
    read_state,
    read_weights,
    special_ids,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.special_tokens import SpecialTokens
from effasr.interop.huggingface.weights import WHISPER
from effasr.interop.huggingface.whisper_config import (
    WHISPER_CLASS,
    read_whisper,
    whisper_feature_mapping,
    whisper_mapping,
)
from effasr.interop.weights import export_weights
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.nn.positions import whisper_sinusoids

_log = logging.getLogger(__name__)

_UNUSED = {
    "encoder_layerdrop": "`encoder_layerdrop`",
    "decoder_layerdrop": "`decoder_layerdrop`",
    "apply_spec_augment": "SpecAugment as transformers has it (`model.spec_augment` is ours)",
}
_POSITIONS = "model.encoder.embed_positions.weight"
_POSITION_ERROR = 2e-4
"""Rounding error of float32 sinusoids of angles up to 1500."""


def import_whisper(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory; see `effasr.interop.huggingface.checkpoint.import_model`.

    Utterances are followed by silence up to the 30 s that such models were trained with:
    ``features.minimum_s``. The tokens that generation suppresses are the decoder's ``suppress`` and
    ``begin_suppress``; its fields of timestamps are kept for an export.
    """
    directory = Path(directory)
    mapping = read_config(directory, "whisper")
    for name, text in _UNUSED.items():
        if mapping.get(name):
            _log.warning("%s is not used in training here.", text)
    weights = read_weights(directory)
    learned = _is_learned(weights.get(_POSITIONS))
    if learned:
        _log.warning(
            "The encoder's position embeddings are not Whisper's sinusoids, but were learnt, as "
            "some versions of transformers fine-tune them; they are trained here as well "
            "(training.freeze=[encoder.embed_positions] keeps them)."
        )
    else:
        weights.pop(_POSITIONS, None)
    if mapping.get("tie_word_embeddings", True):
        weights.pop("proj_out.weight", None)
    config = read_whisper(
        mapping,
        read_preprocessor(directory),
        # Older checkpoints have the generation settings in config.json.
        read_generation(directory) or mapping,
        learned_positions=learned,
    )
    vocab_size = mapping.get("vocab_size", 51_865)
    return config, vocab_size, read_state(config, vocab_size, weights, WHISPER, directory)


def export_whisper(model: ASRModel, directory: str | Path, tokens: SpecialTokens) -> str:
    """Write a directory; see `effasr.interop.huggingface.checkpoint.export_model`.

    There is a warning for a model that was trained without silence, which transformers always adds.
    """
    config, features = whisper_mapping(model.config), whisper_feature_mapping(model.config)
    ids = special_ids(tokens, model.vocab_size)
    # The value is that of published models; nothing reads it.
    ids["bos_token_id"] = tokens.eos_id
    config |= {"vocab_size": model.vocab_size, **ids}
    encoder, decoder = model.config.encoder, model.config.decoder
    assert isinstance(encoder, WhisperEncoderConfig)  # checked by whisper_mapping
    assert decoder is not None
    if model.config.features.framing.minimum < encoder.max_frames:
        _log.warning(
            "The model was trained with `features.minimum_s` = %g, but transformers pads every "
            "utterance to %g s, which may cost accuracy: evaluate what is exported.",
            model.config.features.minimum_s,
            features["chunk_length"],
        )
    warn_about_parts(model.config, ("decoder",), "transformers' Whisper")
    _warn_about_dropouts(model.config)
    warn_about_training_options(model.config, dropouts=False)
    parts = tuple(WHISPER)
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    weights = export_weights(state, WHISPER)
    if encoder.positions == "sinusoidal":
        weights[_POSITIONS] = whisper_sinusoids(torch.arange(encoder.max_frames), encoder.width)
    directory = write(directory, config, weights, features)
    generation = {
        "max_length": decoder.max_positions,
        "suppress_tokens": [*decoder.suppress, *tokens.unused_classes(model.vocab_size)],
        "begin_suppress_tokens": list(decoder.begin_suppress),
        "return_timestamps": False,
        **ids,
        **tokens.generation,
    }
    if decoder.alignment_heads:
        generation["alignment_heads"] = decoder.alignment_heads
    if decoder.max_initial_timestamp is not None:
        generation["max_initial_timestamp_index"] = decoder.max_initial_timestamp
    write_json(directory / "generation_config.json", generation)
    return WHISPER_CLASS


def _is_learned(table: Tensor | None) -> bool:
    """Return whether a table of positions differs from Whisper's sinusoids."""
    if table is None:
        return False
    error = max(_POSITION_ERROR, 2 * torch.finfo(table.dtype).eps)
    expected = whisper_sinusoids(torch.arange(len(table)), table.shape[1])
    return bool((table.float() - expected).abs().max() > error)


def _warn_about_dropouts(config: ModelConfig) -> None:
    names = "residual_dropout", "activation_dropout", "attention_dropout"
    encoder, decoder = config.encoder, config.decoder
    differ = [name for name in names if getattr(encoder, name) != getattr(decoder, name)]
    for name, part in (("encoder", encoder), ("decoder", decoder)):
        if part is not None and part.input_dropout != part.residual_dropout:
            differ.append(f"{name}.input_dropout")
    if differ:
        _log.warning(
            "transformers has one dropout where encoder and decoder differ here, in %s: that of "
            "the decoder's modules is exported.",
            ", ".join(differ),
        )
