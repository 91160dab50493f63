"""The training state of a checkpoint: a mapping of component names to their states."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from effasr.distributed import tensor_files
from effasr.evaluation.metric import Metric
from effasr.optim.adamw import restore as restore_optimizer


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]:
        """Return the state: small tensors and plain values, nested."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class RunProgress:
    step: int = 0  # Updates made
    epoch: int = 0  # Epoch of the last step, from 0
    position: tuple[int, int] = (0, 0)  # Epoch of the next step, and its index there
    # Best metric of a validation: see `evaluation.best_by`; in pretraining, its lowest loss
    best: float = math.inf
    validations_since_best: int = 0  # Number of later validations that were not better
    is_best: bool = False  # Whether the last validation reached it and no step was made since
    must_validate: bool = False  # Whether a validation is due
    validation: str = ""  # Fingerprint of the validation sets that `best` belongs to
    before: float | None = None  # The metric of a Whisper with its silence, before the first step
    finite_step: int = 0  # Last step after which the weights were found to be finite

    def record_metric(self, value: float, metric: Metric) -> None:
        """Record the result of a validation; NaN (no reference words) is no improvement."""
        self.is_best = metric.is_better(value, self.best)
        self.best = value if self.is_best else self.best
        self.validations_since_best = 0 if self.is_best else self.validations_since_best + 1

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__slots__}
        return state | {"position": list(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful`; names of other components are ignored."""
        for name in self.__slots__:
            setattr(self, name, state.get(name, getattr(self, name)))
        epoch, number = state["position"]
        self.position = epoch, number


class OptimizerState:
    """State of an optimizer, and of the weights where a checkpoint publishes their average.

    Small values belong to the training state. Moments and weights are large, and may be sharded,
    so that they go to files of their own, by name (`effasr.distributed.tensor_files`).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, has_average: bool
    ) -> None:
        self._optimizer = optimizer
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._has_average = has_average

    def split(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the small values, and the tensors by name: those in use, on their devices."""
        state, tensors = self._optimizer.state_dict(), {}
        small: dict[int, dict[str, Any]] = {}
        for index, row in state["state"].items():
            for name, value in row.items():
                if isinstance(value, Tensor) and value.dim():
                    tensors[f"optimizer/{index}/{name}"] = value
                else:
                    small.setdefault(index, {})[name] = value
        if self._has_average:
            tensors |= {f"trained/{name}": value for name, value in self._trained.items()}
        return state | {"state": small}, tensors

    def load(self, state: Mapping[str, Any], folder: Path, frozen: Collection[str] = ()) -> None:
        """Continue from small values, and the tensors in a folder.

        The model has the published weights already; those in the folder replace them. If
        parameters of the names ``frozen`` were not trained before, they begin without moments.
        """
        groups, tensors = self._optimizer.param_groups, {}
        parameters = [parameter for group in groups for parameter in group["params"]]
        # The parameters that the saved indices stand for.
        numbers = list(range(len(parameters)))
        if sum(len(group["params"]) for group in state["param_groups"]) < len(parameters):
            names = {parameter: name for name, parameter in self._trained.items()}
            numbers = [n for n in numbers if names[parameters[n]] not in frozen]
            counts = {k: v for k, v in state["param_groups"][0].items() if k == "step"}
            groups = [group | counts for group in self._optimizer.state_dict()["param_groups"]]
            state = {**state, "param_groups": groups}
        rows = {numbers[index]: dict(row) for index, row in state["state"].items()}
        described = tensor_files.describe(folder).items() if folder.is_dir() else ()
        for name, (shape, dtype) in described:
            kind, _, remainder = name.partition("/")
            if kind == "trained":
                tensors[name] = self._trained[remainder].detach()
                continue
            index, _, moment = remainder.partition("/")
            number = numbers[int(index)]
            like = parameters[number]
            if like.shape == shape:
                tensors[name] = torch.zeros_like(like, dtype=dtype)
            else:
                tensors[name] = torch.zeros(shape, dtype=dtype, device=like.device)
            rows.setdefault(number, {})[moment] = tensors[name]
        if tensors:
            tensor_files.read(tensors, folder)
        restore_optimizer(self._optimizer, {**state, "state": rows})
