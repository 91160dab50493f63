"""Selects the weights that are trained: all, those that are not frozen, or adapters."""

from __future__ import annotations

from pathlib import Path

from effasr import checkpoint
from effasr.model.asr import ASRModel
from effasr.nn.lora import adapt
from effasr.nn.parameters.patterns import freeze
from effasr.training.config import TrainConfig


def check_trained(config: TrainConfig) -> None:
    """Raise a ValueError for settings that contradict each other."""
    frozen, lora = config.training.freeze, config.lora
    if lora is not None and frozen:
        raise ValueError(
            "`training.freeze` must be empty with `lora`, which trains nothing but adapters and "
            f"lora.also_train, but is {list(frozen)}: leave it out."
        )
    if lora is not None and config.init_from is None:
        raise ValueError(
            "`init_from` must be given with `lora`, whose adapters are of use only beside weights "
            "that were trained, but is null: name a model directory or a run."
        )
    is_partial = lora is not None or bool(frozen)
    shares_layers = config.training.strategy == "fsdp2" and config.data.text_share is not None
    if is_partial and shares_layers:
        raise ValueError(
            "`training.strategy` must not be fsdp2 where `data.text_share` and `lora` or "
            "`training.freeze` are given, because ranks with text and ranks with speech would then "
            "exchange gradients in different orders: use ddp."
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
    if source is not None and not is_resumed:
        if _is_pretrained(source) and model.best_rq is None:
            checkpoint.load_weights(model, source, only=("encoder.",))
        else:
            # A model to begin with may never have read text.
            checkpoint.load_weights(model, source, may_lack=("text_encoder.",))
    if config.lora is not None:
        adapt(model, config.lora)
    elif config.training.freeze:
        freeze(model, config.training.freeze, "training.freeze")
    if source is None:
        return
    if is_resumed:
        checkpoint.load_weights(model, source)
    elif _is_pretrained(source) and model.best_rq is None:
        _check_drawn(model, config, "ctc_head", "decoder", "projection", "transducer")
    elif checkpoint.read_description(source).model.text_encoder is None:
        _check_drawn(model, config, "text_encoder")


def _is_pretrained(source: Path) -> bool:
    """Return whether a model was pretrained on audio alone, and has nothing but an encoder."""
    return checkpoint.read_description(source).model.best_rq is not None


def _check_drawn(model: ASRModel, config: TrainConfig, *parts: str) -> None:
    """Check that the parts that ``init_from`` lacks are trained."""
    for part in parts:
        module = getattr(model, part)
        parameters = [] if module is None else module.named_parameters(prefix=part)
        stuck = [name for name, parameter in parameters if not parameter.requires_grad]
        if stuck:
            how = "be in `lora.also_train`" if config.lora else "not be in `training.freeze`"
            raise ValueError(
                f"`model.{part}` must {how}, because `init_from` has none and it is drawn anew, "
                f"but {stuck[0]} would not be trained."
            )
