"""Checkpoints of transformers' models of speech recognition, read and written without it.

The models are the same functions: outputs, losses and gradients agree. Reading and writing need
only safetensors; transformers >= 5.23 loads what is written here.
"""

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.interop.huggingface import parakeet, wav2vec2, whisper
from effasr.interop.huggingface.ctranslate2 import is_ctranslate2, read_ctranslate2
from effasr.interop.huggingface.files import (
    Content,
    SpecialTokens,
    read_config,
    read_generation,
    read_preprocessor,
    read_weights,
    write_json,
)
from effasr.interop.tables import (
    check_weights,
    export_weights,
    import_weights,
    norm_as_layer,
    refuse,
    refuse_experts,
    warn_about_options,
    warn_about_parts,
    weight_shapes,
)
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.untrusted.documents import WRONG_VALUES

CLASSES = {**parakeet.CLASSES, **wav2vec2.CLASSES, **whisper.CLASSES}
"""The supported classes by ``model_type``."""

_LOST_OPTIONS = {
    "encoder": ("residual_dropout",),
    "decoder": ("input_dropout", "residual_dropout", "activation_dropout"),
    "transducer": ("dropout", "fastemit", "sigma"),
}
"""Training options that Canary, Parakeet and Moonshine do not have."""


def import_model(
    directory: str | Path, language: str | None = None, blank: int | None = None
) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Configuration, vocabulary size and state for `ASRModel`, of a model directory.

    ``language`` names the adapters of MMS that are read, by default those within the weights, and
    ``blank`` the class of a wav2vec 2.0's blank, by default that of ``config.json``, which names
    the class of models. The weights become float32. The vocabulary size does not count a blank,
    which must be the last class.
    """
    directory = Path(directory)
    try:
        content = _read_content(directory)
        if language is not None:
            content = wav2vec2.with_language(content, directory, language)
        if blank is not None:
            content = wav2vec2.with_blank(content, blank)
        class_ = CLASSES[content.config["model_type"]]
        config, vocab_size = class_.read(content)
        shapes = weight_shapes(config, vocab_size)
        state, unknown = import_weights(content.weights, shapes, class_.weights)
        check_weights(state | unknown, shapes, directory)
    except WRONG_VALUES as error:
        raise ValueError(
            f"{directory}: a value of its configuration or a weight is of a wrong kind "
            f"({type(error).__name__}: {error}): copy the folder again."
        ) from error
    return config, vocab_size, state


def _read_content(directory: Path) -> Content:
    if is_ctranslate2(directory):
        return read_ctranslate2(directory)
    mapping = read_config(directory, *CLASSES)
    weights, generation = read_weights(directory), read_generation(directory)
    return Content(mapping, read_preprocessor(directory), generation, weights)


def export_model(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> str:
    """Write a directory of the first output that the model has; return the class that loads it.

    That is the decoder, else the transducer, else the CTC head. Other parts, SpecAugment and
    training options that transformers does not have are left out with a warning: they do not change
    what the exported model computes. ``tokens`` are canary-1b-v2's by default.
    """
    refuse_experts(model.config, "transformers")
    model = norm_as_layer(model)
    config = model.config
    class_ = CLASSES[_model_type(config)]
    lost = config.language_prompt is not None and "language_prompt." not in class_.weights
    refuse("transformers", {"language_prompt but with a Nemotron's encoder and transducer": lost})
    content = class_.write(model, SpecialTokens() if tokens is None else tokens)
    warn_about_parts(config, (class_.part,), f"transformers' {class_.short_name}")
    warn_about_options(_lost_options(config, class_.part))
    names = tuple(class_.weights)
    state = {name: value for name, value in model.state_dict().items() if name.startswith(names)}
    weights = export_weights(state, class_.weights) | content.weights
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {"architectures": [class_.name], "dtype": "float32", **content.config}
    write_json(directory / "config.json", fields)
    write_json(directory / "preprocessor_config.json", content.preprocessor)
    for name, mapping in (("generation", content.generation), ("processor", content.processor)):
        if mapping:
            write_json(directory / f"{name}_config.json", mapping)
    return class_.name


def _model_type(config: ModelConfig) -> str:
    if isinstance(config.encoder, WhisperEncoderConfig):
        return "whisper"
    if isinstance(config.encoder, Wav2Vec2EncoderConfig):
        return config.encoder.family
    if config.decoder is not None:
        return "canary" if config.decoder.width == config.encoder.width else "cohere_asr"
    if parakeet.is_streaming_transducer(config):
        has_prompt = config.language_prompt is not None
        return "nemotron3_5_asr" if has_prompt else "nemotron_asr_streaming"
    if config.transducer is not None:
        return "parakeet_rnnt" if config.transducer.durations is None else "parakeet_tdt"
    return "parakeet_ctc"


def _lost_options(config: ModelConfig, part: str) -> list[str]:
    lost = []
    is_moonshine = getattr(config.encoder, "family", None) == "moonshine"
    for name, options in _LOST_OPTIONS.items():
        # The others have these dropouts, and a transducer that is left out loses no options.
        if not (isinstance(config.encoder, FastConformerConfig) or is_moonshine) or (
            name == "transducer" and part != name
        ):
            continue
        values = {option: getattr(getattr(config, name), option, 0.0) for option in options}
        lost += [f"{name}.{option} = {value}" for option, value in values.items() if value]
    return lost + ["spec_augment"] * (config.spec_augment != SpecAugmentConfig())
