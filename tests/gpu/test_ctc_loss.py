"""`ctc_loss` in Triton against its definition."""

from collections.abc import Sequence
from typing import Any

import torch

from effasr_kernels.ctc_loss import CtcArguments, _triton
from tests.support.loss_calls import Arguments, ctc_arguments, gradients


def _arguments(
    frames: Sequence[int], transcripts: Any, device: torch.device, classes: int = 6, **options: Any
) -> Arguments:
    return ctc_arguments(frames, transcripts, device, classes=classes, bias=None, **options)


def test_classes_of_no_probability(device: torch.device) -> None:
    """A bias of -inf masks a class: the transcripts that need it are impossible."""
    arguments = _arguments((3, 2, 5), ([1], [1, 3], [4, 0, 4]), device)
    arguments["bias"] = torch.tensor([0.0, 0, -torch.inf, 0, 0, -torch.inf], device=device)
    upstream = torch.tensor([1.0, 0.5, -1.0])
    actual = gradients(arguments, upstream)
    assert actual["loss"].isfinite().tolist() == [True] * 3
    arguments["bias"][1] = -torch.inf
    actual = gradients(arguments, upstream)
    assert actual["loss"].tolist()[:2] == [torch.inf] * 2
    assert bool((actual["hidden"][:5] == 0).all())
    assert bool((actual["hidden"][5:] != 0).any())
    assert bool(actual["weight"].isfinite().all())


def test_a_label_that_is_the_blank_is_not_written_twice(device: torch.device) -> None:
    """It is wrong, but must not make two threads race for one element."""
    arguments = _arguments((5,), ([1, 2, 1],), device)
    layouts = arguments["layout_frames"], arguments["layout_targets"]
    (loss,), saved = _triton.forward(CtcArguments(**arguments))
    _, classes, _ = _triton.occupancies_of(
        torch.ones_like(loss), loss, saved[1:], arguments["targets"], *layouts, 2
    )
    assert classes.tolist() == [1, -1, -1]
