"""Checks what an export cannot express or leaves out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from effasr.model.config import ModelConfig

_log = logging.getLogger(__name__)


def refuse(framework: str, reasons: Mapping[str, bool]) -> None:
    """Check that no reason holds against an export.

    Raises:
        ValueError: Some do; the message lists all of them.
    """
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"this model cannot be exported, because {framework} has no {'; no '.join(found)}."
        )


def refuse_experts(config: ModelConfig, framework: str) -> None:
    """Check that no part of a model has experts, which no other framework's model has.

    Raises:
        ValueError: One has.
    """
    parts = ("encoder", "decoder", "text_encoder")
    refuse(
        framework,
        {f"{x}.experts": getattr(getattr(config, x), "experts", None) is not None for x in parts},
    )


def warn_about_parts(config: ModelConfig, exported: Collection[str], target: str) -> None:
    """Warn about each part of a model that an export leaves out.

    Args:
        config: Configuration of the model.
        exported: Fields of the configuration whose parts the exported model has.
        target: The class that is exported.
    """
    for field, name in (
        ("decoder", "decoder"),
        ("ctc", "CTC head"),
        ("transducer", "transducer"),
        ("text_encoder", "text encoder"),
    ):
        if getattr(config, field) and field not in exported:
            _log.warning("The %s is not exported: %s has none.", name, target)


def warn_about_options(options: Sequence[str]) -> None:
    """Warn about training options that the exported model does not have."""
    if options:
        _log.warning("Options of training are not exported: %s.", ", ".join(options))
