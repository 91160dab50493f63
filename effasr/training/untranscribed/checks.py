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
