"""TensorBoard, Weights & Biases and MLflow: the figures of a run, under the same names in all.

A logger that fails, such as for want of a network or of its package, is left out after one warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from effasr.training.loss import LOSSES

log = logging.getLogger(__name__)

PROJECT = "effasr"  # where the environment names none


class Logger(Protocol):
    id: str  # by which a resumed run is continued

    def figures(self, values: Mapping[str, float], step: int) -> None: ...

    def text(self, name: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    id = ""

    def __init__(self, run: Path, id: str, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)
        self.close = self._writer.close

    def figures(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)


class WandB:
    """Folder, project and mode by WANDB_DIR, WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, run: Path, id: str, config: Mapping[str, Any], step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._html = wandb.Html
        project, folder = os.environ.get("WANDB_PROJECT", PROJECT), os.environ.get("WANDB_DIR", run)
        self._run = wandb.init(
            project=project, name=run.name, dir=folder, id=id or None, resume="allow", config=config
        )
        # Its own steps may not go back, as those of a resumed run do.
        self._run.define_metric("*", step_metric="step")
        self.id, self.close = self._run.id, self._run.finish

    def figures(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({"step": step, name: self._html(f"<pre>{escape(text)}</pre>")})


class MLflow:
    """Server and experiment by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: Path, id: str, config: Mapping[str, Any], step: int) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        if id:
            self._client.update_run(id, "RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            id = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._client.log_dict(id, dict(config), "config.yaml")
        self.id = id

    def figures(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.id, name, value, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.log_text(self.id, text, f"{name}/{step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self.id)


KINDS: dict[str, Callable[[Path, str, Mapping[str, Any], int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


class Loggers:
    """Those of a run; ``ids`` are theirs, from an earlier part of the run."""

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        ids: Mapping[str, str],
        config: Mapping[str, Any],
        step: int,
    ) -> None:
        self._open: dict[str, Logger] = {}
        for name in names:
            with _Attempt(self._open, name):
                self._open[name] = KINDS[name](run, ids.get(name, ""), config, step)
        self.ids = {name: logger.id for name, logger in self._open.items() if logger.id}

    def figures(self, group: str, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line of metrics or of a validation, but losses without a head."""
        absent = {"step", "epoch", *(name for name in LOSSES if not line.get(name))}
        absent |= {"guided_on"} if "guided" in absent else set()
        values = {
            _name(group, name): float(value)
            for name, value in line.items()
            if name not in absent and isinstance(value, int | float)
        }
        self._each(lambda logger: logger.figures(values, line["step"]))

    def text(self, name: str, text: str, step: int) -> None:
        self._each(lambda logger: logger.text(_name(name), text, step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], object]) -> None:
        for name, logger in list(self._open.items()):
            with _Attempt(self._open, name):
                call(logger)


class _Attempt:
    def __init__(self, open_loggers: dict[str, Logger], name: str) -> None:
        self._open, self._name = open_loggers, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._open.pop(self._name, None)
        hint = f": `pip install {self._name}`" if isinstance(error, ImportError) else ""
        log.warning(
            "training.loggers: %s failed and is left out until the next start (%s: %s)%s",
            *(self._name, type(error).__name__, error, hint),
        )
        return True


def _name(*parts: str) -> str:
    """Return a name that all of them accept."""
    return re.sub(r"[^\w\-./ ]", "_", "/".join(parts))
