"""Reads the weights that a run starts from, and selects those that are trained."""

from __future__ import annotations

from pathlib import Path

from effasr import checkpoint
from effasr.data.tokenizer import load_tokenizer
from effasr.model.asr import ASRModel
from effasr.nn.lora import adapt
from effasr.nn.parameters import freeze
from effasr.training.config import TrainConfig
from effasr.training.starting import vocabulary


def check_trained(config: TrainConfig) -> None:
    """Raise a ValueError for settings that contradict each other."""
    frozen, lora = config.training.freeze, config.lora
    if lora is not None and frozen:
        raise ValueError(
            "`training.freeze` must be empty with `lora`, which trains nothing but adapters and "
            f"lora.also_train, but is {list(frozen)}: leave it out."
        )
    joined = config.model.language_model
    has_weights = joined is not None and joined.weights == "pretrained"
    if lora is not None and config.init_from is None and not has_weights:
        raise ValueError(
            "`init_from` must be given with `lora`, whose adapters are of use only beside weights "
            "that were trained, but is null: name a model directory or a run."
        )


def prepare_weights(
    model: ASRModel, config: TrainConfig, source: Path | None, *, is_resumed: bool
) -> None:
    """Read weights, add adapters, and set which parameters require gradients.

    Args:
        model: Initialised model.
        config: Configuration of the run.
        source: Model directory to read; None for none.
        is_resumed: Whether that is a checkpoint of this run, with its adapters.

    Raises:
        ValueError: Weights do not fit, a pattern matches nothing, or a part that was initialised
            would never be trained.
    """
    joins = not is_resumed and joins_language_model(config, source)
    replaced = False
    if source is not None and not is_resumed:
        replaced = vocabulary.replaces_tokenizer(config.data.tokenizer, source)
    if joins:
        _join(model, config, source)
    elif source is not None and not is_resumed:
        if _is_pretrained(source) and model.best_rq is None:
            checkpoint.load_weights(model, source, only=("encoder.",))
        elif replaced:
            vocabulary.load_weights(model, source, load_tokenizer(config.data.tokenizer))
        else:
            # A model to begin with may never have read text.
            checkpoint.load_weights(model, source, may_lack=("text_encoder.",))
    if config.lora is not None:
        adapt(model, config.lora)
    elif config.training.freeze:
        freeze(model, config.training.freeze, "training.freeze")
    if joins:
        _check_drawn(model, config, "language_model.adapter")
        return
    if source is None:
        return
    if is_resumed:
        checkpoint.load_weights(model, source)
        return
    if _is_pretrained(source) and model.best_rq is None:
        _check_drawn(model, config, "ctc_head", "decoder", "projection", "transducer")
        return
    if replaced:
        tables = [name for name in vocabulary.TABLES if name in dict(model.named_parameters())]
        _check_drawn(model, config, *(name.rpartition(".")[0] for name in tables))
    if checkpoint.read_description(source).model.text_encoder is None:
        _check_drawn(model, config, "text_encoder")


def joins_language_model(config: TrainConfig, source: Path | None) -> bool:
    """Return whether a run that begins puts a language model behind an encoder."""
    if config.model.language_model is None:
        return False
    return source is None or checkpoint.read_description(source).model.language_model is None


def _join(model: ASRModel, config: TrainConfig, source: Path | None) -> None:
    """Read the encoder of ``source``, if given, and the language model of its folder."""
    # Imported here, because transformers takes seconds.
    from effasr.interop.huggingface.language_model import read_language_model

    settings, language_model = config.model.language_model, model.language_model
    assert settings is not None
    assert language_model is not None
    if source is not None:
        checkpoint.load_weights(model, source, only=("encoder.", "features."))
    if settings.weights == "pretrained":
        read_language_model(settings.path, language_model)
    language_model.check_against_transformers()


def _is_pretrained(source: Path) -> bool:
    """Return whether a model was pretrained on audio alone, and has nothing but an encoder."""
    return checkpoint.read_description(source).model.best_rq is not None


def _check_drawn(model: ASRModel, config: TrainConfig, *parts: str) -> None:
    """Check that parts which are drawn anew are trained."""
    for part in parts:
        named = model.named_parameters()
        stuck = [name for name, x in named if name.startswith(f"{part}.") and not x.requires_grad]
        if stuck:
            how = "be in `lora.also_train`" if config.lora else "not be in `training.freeze`"
            raise ValueError(
                f"`model.{part}` must {how}, because `init_from` has none and it is drawn anew, "
                f"but {stuck[0]} would not be trained."
            )
