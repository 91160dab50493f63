"""Checks that data, model and loop agree on what has a text."""

from __future__ import annotations

from effasr.training.config import TrainConfig


def check_text(config: TrainConfig) -> None:
    """Check that utterances without text have a use, and that what they are for has them.

    Raises:
        ValueError: `data.text` does not fit the model or the loop.
    """
    text = config.data.text
    if config.model.best_rq is not None:
        if text != "ignored":
            raise ValueError(
                f"`data.text` must be ignored where `model.best_rq` is given, but is {text}: set "
                "it to ignored; or, to fine-tune a pretrained encoder, give `model` an output, "
                "such as model.ctc=true."
            )
        if config.data.tokenizer:
            raise ValueError(
                "`data.tokenizer` must be left out where `model.best_rq` is given, because no text "
                f"is read, but is {config.data.tokenizer!r}."
            )
    elif text == "ignored":
        raise ValueError(
            "`data.text` must be required or optional for a model that learns from texts, but is "
            "ignored: give model.best_rq to pretrain on audio alone."
        )
    teaches = config.training.teacher is not None
    if teaches != (text == "optional"):
        raise ValueError(
            "`training.teacher` must be given where `data.text` is optional, and nowhere else, but "
            f"is {'given' if teaches else 'null'} with `data.text` {text}: set "
            "training.teacher.min_confidence and data.text=optional, or neither."
        )
    if teaches:
        _check_teacher(config)


def _check_teacher(config: TrainConfig) -> None:
    settings, model = config.training, config.model
    for name, value, rule in (
        ("training.ema_decay", settings.ema_decay is not None, "be given, such as 0.999"),
        ("training.strategy", settings.strategy == "ddp", "be ddp"),
        ("optimizer.adascale", config.optimizer.adascale is None, "be null"),
        ("model.ctc", model.ctc, "be true, because the teacher writes what CTC says"),
        ("model.transducer", model.transducer is None, "be null"),
        ("loss.ctc_weight", config.loss.ctc_weight != 0, "be greater than 0"),
    ):
        if not value:
            raise ValueError(
                f"`{name}` must {rule}, where `training.teacher` is given, but is not."
            )
