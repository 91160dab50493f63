"""Reports how the training steps of a recipe run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from effasr import config as configuration
from effasr.cli.installation.report import Row
from effasr.distributed.process_group import choose_device
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import obstacles, uses_graph
from effasr.training.strategies.parallelism import is_bfloat16, reason_for_autocast


def recipe_rows(recipe: str | None, overrides: Sequence[str]) -> list[Row]:
    """Return the rows of a recipe; none without one.

    Raises:
        ValueError: The recipe cannot be used, or fields are given without one.
    """
    if recipe is None:
        if overrides:
            raise ValueError(
                f"`overrides` must come with --recipe, whose fields they change, but are "
                f"{' '.join(overrides)}: add --recipe RECIPE."
            )
        return []
    config = _with_architecture(configuration.load(TrainConfig, recipe, overrides))
    device = choose_device(config.training.device)
    precision = "bfloat16" if is_bfloat16(config.training.precision, device) else "float32"
    section = f"recipe {recipe} on {device.type}"
    values = {"training.compile": "yes" if config.training.compile else "no"}
    if config.model.language_model is not None:
        values |= {
            "training.strategy": config.training.strategy,
            "data.frame_budget": str(config.data.frame_budget),
        }
    rows = [
        Row(section, "training.precision", precision, "of matrix products"),
        _graph(config, section, device),
        _casts(config, section, device),
    ]
    rows += [Row(section, name, value, "") for name, value in values.items()]
    if config.model.language_model is not None:
        rows += _rows_of_language_model(config, section)
    return rows


def _with_architecture(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the architecture of its language model, if it is here."""
    settings = config.model.language_model
    if settings is None or settings.architecture is not None:
        return config
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import CONFIG_FILE, read_architecture

    if not (Path(settings.path) / CONFIG_FILE).is_file():
        return config
    settings = replace(settings, architecture=read_architecture(settings.path))
    return replace(config, model=replace(config.model, language_model=settings))


def _rows_of_language_model(config: TrainConfig, section: str) -> list[Row]:
    budget, settings = config.data.token_budget, config.model.language_model
    note = "rows of the language model" + (
        ", as the data fill along with the frames" if budget is None else ""
    )
    value = "by the data" if budget is None else f"{budget}"
    rows = [Row(section, "data.token_budget", value, note)]
    if settings is not None and settings.architecture is not None:
        from effasr.model.language_model.fused import fused_modules

        # On a CPU the modules keep their own forwards.
        found, where = fused_modules(settings.architecture), "on a GPU: one kernel each"
        rows.append(Row(section, "fused modules", found, where))
    return rows


def _graph(config: TrainConfig, section: str, device: torch.device) -> Row:
    found = obstacles(config, device)
    reasons = "; ".join(f"{x.setting}: {x.reason}" for x in found)
    settings = config.model.language_model
    if settings is not None and settings.architecture is None and not found:
        reasons = f"if the modules of {settings.path} read nothing from the GPU; it is not here"
    asked = config.training.cuda_graph
    value = "yes" if uses_graph(config, device) else "no"
    if asked is True and found:
        value = "refused"
    elif asked is False and not found:
        reasons = "possible, but turned off"
    return Row(section, "training.cuda_graph", value, reasons)


def _casts(config: TrainConfig, section: str, device: torch.device) -> Row:
    # Several ranks, as fsdp2 differs from the other strategies only there.
    reason = reason_for_autocast(config, device, 2)
    asked = config.training.bfloat16_weights
    if asked == "auto":
        value, note = ("yes", "") if reason is None else ("no", reason)
    else:
        value, note = ("yes" if asked else "no"), "as the recipe says"
    return Row(section, "training.bfloat16_weights", value, note)
