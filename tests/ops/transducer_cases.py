"""Calls of `transducer_loss`, without and with durations."""

import torch
from torch import Tensor

from effasr_kernels import transducer_loss
from effasr_kernels.testing.conformance import Case, Packed, Shared

JOINT, CLASSES = 3, 5


def labels_for(length: int, blank_id: int) -> Tensor:
    labels = torch.randint(CLASSES - 1, (length,))
    return labels + (labels >= blank_id)


def case_for(
    frames: tuple[int, ...],
    durations: tuple[int, ...] | None = None,
    *,
    activation: str = "tanh",
    blank_id: int = 2,
    fastemit: float = 0.0,
    sigma: float = 0.0,
) -> Case:
    """A transcript of a third of each length."""
    labels = [labels_for((n + 2) // 3, blank_id) for n in frames]

    def run(packed: Packed, shared: Shared) -> Tensor:
        encoded, targets = packed["encoded"], packed["targets"]
        return transducer_loss(
            encoded.values,
            packed["predicted"].values,
            targets.values,
            encoded.layout,
            targets.layout,
            shared["weight"],
            shared["bias"],
            blank_id=blank_id,
            activation=activation,  # type: ignore[arg-type]
            fastemit=fastemit,
            durations=durations,
            sigma=sigma,
        )

    rows = CLASSES + len(durations or ())
    return Case(
        run,
        {
            "encoded": [torch.randn(n, JOINT, dtype=torch.float64) for n in frames],
            "predicted": [torch.randn(len(y) + 1, JOINT, dtype=torch.float64) for y in labels],
            "targets": labels,
        },
        {
            "weight": torch.randn(rows, JOINT, dtype=torch.float64),
            "bias": torch.randn(rows, dtype=torch.float64),
        },
        one_more=frozenset({"predicted"}),
        has_true_gradient=fastemit == 0,
        rounds_inside=True,
    )
