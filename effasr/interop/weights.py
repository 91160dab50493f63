"""Weights of an `ASRModel` under the names and in the shapes of other frameworks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig

Renames = Mapping[str, Sequence[tuple[str, str | tuple[str, ...]]]]
"""Parts of names to replace, in this order, by the first part of effasr's name: effasr's part and
the other library's. Several of the latter are the row blocks of one matrix in effasr, in order."""

# Linear layers over channels that other libraries store as convolutions of kernel size 1.
_POINTWISE = re.compile(r"encoder\.layers\..*\.conv\.pointwise[12]\.weight|ctc_head\.weight")
_POINTWISE_2D = re.compile(r"encoder\.subsampling\.pointwise[12]\.weight")
_DEPTHWISE = re.compile(r"encoder\.layers\..*\.conv\.depthwise\.weight")

Reorder = Callable[[str, Tensor], Tensor]
"""Changes the channel order of a weight, which is given with effasr's name."""


def export_weights(
    state: Mapping[str, Tensor], renames: Renames, reorder: Reorder | None = None
) -> dict[str, Tensor]:
    """Rename, split and reshape weights, or their gradients.

    Args:
        state: Weights of the parts of an `ASRModel` that the other model has.
        renames: Our names and theirs.
        reorder: Permutation from our order of channels to theirs, where they differ.

    Returns:
        Tensors on the CPU that share no memory with one another.
    """
    exported: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _POINTWISE.fullmatch(name):
            tensor = tensor[..., None]
        elif _POINTWISE_2D.fullmatch(name):
            tensor = tensor[..., None, None]
        elif _DEPTHWISE.fullmatch(name):
            tensor = tensor[:, None]
        elif reorder is not None:
            tensor = reorder(name, tensor)
        theirs = _their_names(name, renames)
        pieces = tensor.chunk(len(theirs)) if len(theirs) > 1 else (tensor,)
        for part, piece in zip(theirs, pieces, strict=True):
            exported[part] = piece.detach().cpu().clone(memory_format=torch.contiguous_format)
    return exported


def import_weights(
    weights: Mapping[str, Tensor],
    names: Iterable[str],
    renames: Renames,
    reorder: Reorder | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the inverse of `export_weights`; floating-point tensors become float32.

    Args:
        weights: Weights of the other model.
        names: Names of our model's weights. One that misses a piece is left out.
        renames: Our names and theirs.
        reorder: Permutation from their order of channels to ours, where they differ.

    Returns:
        Our weights, and those of the other model that are none of ours.
    """
    ours: dict[str, Tensor] = {}
    rest = dict(weights)
    for name in names:
        theirs = _their_names(name, renames)
        if any(part not in rest for part in theirs):
            continue
        pieces = [rest.pop(part) for part in theirs]
        tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if _POINTWISE.fullmatch(name):
            tensor = tensor[..., 0]
        elif _POINTWISE_2D.fullmatch(name):
            tensor = tensor[..., 0, 0]
        elif _DEPTHWISE.fullmatch(name):
            tensor = tensor[:, 0]
        elif reorder is not None:
            tensor = reorder(name, tensor)
        ours[name] = tensor.float() if tensor.is_floating_point() else tensor
    return ours, rest


def weight_shapes(config: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    """Return the shapes of all weights of a model, by name."""
    with torch.device("meta"):
        state = ASRModel(config, vocab_size).state_dict()
    return {name: value.shape for name, value in state.items()}


def check_weights(
    state: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size],
    path: Path,
    description: str = "config.json",
) -> None:
    """Check that a state has the weights of a model, and no others.

    Args:
        state: Our weights, and those of the file that are unknown here.
        expected: Shapes from `weight_shapes`.
        path: Path of the file, for the message.
        description: The file with the configuration.

    Raises:
        ValueError: Some differ; the message names the first.
    """
    found = {name: value.shape for name, value in state.items()}
    names = expected.keys() | found.keys()
    wrong = sorted(name for name in names if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        shapes = [
            "nothing" if shape is None else str(tuple(shape))
            for shape in (expected.get(first), found.get(first))
        ]
        raise ValueError(
            f"the weights in {path} must be those that {description} asks for, but {len(wrong)} "
            f"are missing, unknown or of another shape: the first is {first}, expected "
            f"{shapes[0]}, found {shapes[1]}."
        )


def _their_names(name: str, renames: Renames) -> list[str]:
    """Return the names of the pieces of a weight in the other framework."""
    table = next(pairs for prefix, pairs in renames.items() if name.startswith(prefix))
    names = [name]
    for ours, theirs in table:
        if ours in name:
            others = (theirs,) if isinstance(theirs, str) else theirs
            names = [one.replace(ours, other) for one in names for other in others]
    return names
