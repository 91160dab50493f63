"""TensorBoard, Weights & Biases and MLflow: the figures of a run, under the same names in all.

Each writes in a thread, so that a slow server delays no step. A logger that fails, such as for want
of a network or of its package, is left out after one warning.
"""

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from effasr.training.loss import LOSSES

log = logging.getLogger(__name__)

PROJECT = "effasr"  # where the environment names none
_FLUSH_S = 60.0  # most that the end of a run waits for a slow server


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
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        self._client, self._metric = MlflowClient(), Metric
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
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics)

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
        self._open: dict[str, _Writer] = {}
        self.ids: dict[str, str] = {}
        for name in names:
            try:
                logger = KINDS[name](run, ids.get(name, ""), config, step)
            except Exception as error:
                _warn(name, error)
                continue
            self._open[name] = _Writer(name, logger)
            if logger.id:
                self.ids[name] = logger.id

    def figures(self, group: str, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line of metrics or of a validation, but losses without a head."""
        absent = {"step", "epoch", *(name for name in LOSSES if not line.get(name))}
        absent |= {"guided_on"} if "guided" in absent else set()
        values = {
            _name(group, name): float(value)
            for name, value in line.items()
            if name not in absent and isinstance(value, int | float)
        }
        step = line["step"]
        self._each(lambda logger: logger.figures(values, step))

    def text(self, name: str, text: str, step: int) -> None:
        self._each(lambda logger: logger.text(_name(name), text, step))

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        deadline = time.monotonic() + _FLUSH_S
        for name, writer in self._open.items():
            writer.calls.put(None)
            writer.thread.join(max(0.0, deadline - time.monotonic()))
            if writer.thread.is_alive():
                log.warning("training.loggers: %s is too slow, and lacks the last figures", name)
        self._open = {}

    def _each(self, call: Callable[[Logger], object]) -> None:
        for writer in self._open.values():
            writer.calls.put(call)


class _Writer:
    """Makes the calls of a logger in order, in a thread."""

    def __init__(self, name: str, logger: Logger) -> None:
        self.calls: queue.SimpleQueue[Callable[[Logger], object] | None] = queue.SimpleQueue()
        self._name, self._logger = name, logger
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"logger {name}")
        self.thread.start()

    def _run(self) -> None:
        has_failed = False
        while (call := self.calls.get()) is not None:
            try:
                if not has_failed:
                    call(self._logger)
            except Exception as error:
                has_failed = True
                _warn(self._name, error)


def _warn(name: str, error: Exception) -> None:
    hint = f": `pip install {name}`" if isinstance(error, ImportError) else ""
    log.warning(
        "training.loggers: %s failed and is left out until the next start (%s: %s)%s",
        *(name, type(error).__name__, error, hint),
    )


def _name(*parts: str) -> str:
    """Return a name that all of them accept."""
    return re.sub(r"[^\w\-./ ]", "_", "/".join(parts))
