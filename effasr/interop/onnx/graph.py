"""Export of one module as an ONNX graph, and its execution by onnxruntime."""

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OPSET = 18
_LARGEST_BYTES = 1_500_000_000
"""Most bytes of weights in a graph file (limited to 2 GB); more go to a separate file."""
_TOLERANCE = 1e-3
"""Largest difference of a checked output, relative to its largest value."""


def check_packages() -> None:
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"`format` onnx needs the package {package}, which is not installed: "
                "pip install 'effasr[onnx]'."
            )


def write_graph(
    module: nn.Module,
    path: Path,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, str]],
) -> None:
    """Write a module as a graph; ``inputs`` are examples, ``dynamic`` their dynamic sizes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=path.parent) as folder:
        target = Path(folder) / path.name
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (),
                target,
                kwargs=dict(inputs),
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=dict(dynamic),
                opset_version=_OPSET,
                external_data=size > _LARGEST_BYTES,
                dynamo=True,
                verbose=False,
            )
        # The graph is moved last: without it the other files are unused.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == target):
            os.replace(file, path.parent / file.name)


class Graph:
    """A graph on the host, run by onnxruntime."""

    def __init__(self, path: Path):
        import onnxruntime

        self.name = path.name
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def compared(
        self, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the graph and compare its outputs with those of the model."""
        values = {name: value.contiguous().numpy() for name, value in inputs.items()}
        outputs = dict(zip(self._outputs, self._session.run(None, values), strict=True))
        if list(outputs) != list(expected):
            raise ValueError(
                f"{self.name} must have the outputs {', '.join(expected)}, but has "
                f"{', '.join(outputs)}: export it again."
            )
        for name, value in expected.items():
            _compare(f"{self.name}: {name}", value.numpy(), outputs[name])
        return {name: torch.from_numpy(value) for name, value in outputs.items()}


def _compare(name: str, expected: np.ndarray, actual: Any) -> None:
    if expected.shape != actual.shape:
        raise ValueError(
            f"{name} must have the shape {expected.shape}, but has {actual.shape}: "
            "this version of torch or onnxruntime exports or runs it wrongly."
        )
    difference = np.abs(expected - actual).max(initial=0)
    largest = np.abs(expected).max(initial=1e-6)
    if not difference <= _TOLERANCE * largest:
        raise ValueError(
            f"{name} must be what the model computes, but differs by {difference:.3g} of "
            f"{largest:.3g}: this version of torch or onnxruntime exports or runs it wrongly."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which logs its steps as warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
