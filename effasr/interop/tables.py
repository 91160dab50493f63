"""Checkpoints of other frameworks as tables: names of weights, fields of configurations, checks.

A class of models is a `Renames` table, `Section` tables, and the few fields that need code.
"""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.checks import check
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig

_log = logging.getLogger(__name__)

Renames = Mapping[str, Sequence[tuple[str, str | tuple[str, ...]]]]
"""Parts of names to replace, in this order, by the first part of effasr's name: effasr's part and
the other library's. Several of the latter are the row blocks of one matrix in effasr, in order."""

Reorder = Callable[[str, Tensor], Tensor]
"""Changes the channel order of a weight, which is given with effasr's name."""

_POINTWISE = r"encoder\.layers\..*\.conv\.pointwise[12]\.weight|ctc_head\.weight"
_WHOLE = slice(None)
# Linear layers that other libraries store as convolutions, and depthwise convolutions: the index
# that makes their shape of ours, and ours of theirs.
_SHAPES: tuple[tuple[re.Pattern[str], Any, Any], ...] = (
    (re.compile(_POINTWISE), (..., None), (..., 0)),
    (re.compile(r"encoder\.subsampling\.pointwise[12]\.weight"), (..., None, None), (..., 0, 0)),
    (
        re.compile(r"encoder\.layers\..*\.gate_scale"),
        (None, _WHOLE, None, None),
        (0, _WHOLE, 0, 0),
    ),
    (re.compile(r"encoder\.layers\..*\.conv\.depthwise\.weight"), (_WHOLE, None), (_WHOLE, 0)),
)


def export_weights(
    state: Mapping[str, Tensor], renames: Renames, reorder: Reorder | None = None
) -> dict[str, Tensor]:
    """Rename, split and reshape weights or gradients of common parts; copies on the CPU."""
    exported: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = _their_names(name, renames)
        tensor = _reshaped(name, tensor, 0, reorder)
        pieces = tensor.chunk(len(parts)) if len(parts) > 1 else (tensor,)
        for part, piece in zip(parts, pieces, strict=True):
            exported[part] = piece.detach().cpu().clone(memory_format=torch.contiguous_format)
    return exported


def import_weights(
    weights: Mapping[str, Tensor],
    names: Iterable[str],
    renames: Renames,
    reorder: Reorder | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Our weights of these names, and the other model's that are none of ours.

    It is the inverse of `export_weights`; floating-point tensors become float32, and a name that
    misses a piece is left out.
    """
    ours: dict[str, Tensor] = {}
    remaining = dict(weights)
    for name in names:
        parts = _their_names(name, renames)
        if any(part not in remaining for part in parts):
            continue
        pieces = [remaining.pop(part) for part in parts]
        tensor = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        tensor = _reshaped(name, tensor, 1, reorder)
        ours[name] = tensor.float() if tensor.is_floating_point() else tensor
    return ours, remaining


_OUTPUT = re.compile(r"(feed_forward[12]\.linear2|self_attn\.o_proj|conv\.pointwise2)\..*")


def norm_as_layer(model: ASRModel) -> ASRModel:
    """Return the same function without `subsampling_norm`, which other frameworks do not have.

    A layer whose modules add zeros is its last norm, so that one more layer is that norm.
    """
    encoder = model.config.encoder
    if not isinstance(encoder, FastConformerConfig) or not encoder.subsampling_norm:
        return model
    scale = math.sqrt(encoder.width) if encoder.scale_input else 1.0
    state = {}
    for name, value in model.state_dict().items():
        part, _, of_layer = name.removeprefix("encoder.layers.").partition(".")
        if name.startswith("encoder.subsampling_norm."):
            name, value = f"encoder.layers.0.norm_out.{name.rpartition('.')[2]}", value * scale
        elif name.startswith("encoder.layers."):
            if part == "0" and not of_layer.startswith("norm_out."):
                # Other weights are not zero, so that the layer can be trained.
                state[name] = torch.zeros_like(value) if _OUTPUT.fullmatch(of_layer) else value
            name = f"encoder.layers.{int(part) + 1}.{of_layer}"
        state[name] = value
    changed = replace(encoder, layers=encoder.layers + 1, subsampling_norm=False, scale_input=False)
    config = replace(model.config, encoder=changed)
    return ASRModel.from_state_dict(config, model.vocab_size, state).eval()


def _reshaped(name: str, tensor: Tensor, way: int, reorder: Reorder | None) -> Tensor:
    """A weight with our name in the shape of the other library (way 0), or in ours (1)."""
    for pattern, *index in _SHAPES:
        if pattern.fullmatch(name):
            return tensor[index[way]]
    return tensor if reorder is None else reorder(name, tensor)


def _their_names(name: str, renames: Renames) -> list[str]:
    """The names of the pieces of a weight in the other framework."""
    table = next(pairs for prefix, pairs in renames.items() if name.startswith(prefix))
    names = [name]
    for ours, theirs in table:
        if ours in name:
            pieces = (theirs,) if isinstance(theirs, str) else theirs
            names = [part.replace(ours, piece) for part in names for piece in pieces]
    return names


def weight_shapes(config: ModelConfig, vocab_size: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        state = ASRModel(config, vocab_size).state_dict()
    return {name: value.shape for name, value in state.items()}


def check_weights(
    state: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size],
    path: Path,
    description: str = "config.json",
) -> None:
    """Check that a state, with the file's unknown weights, has those of a model and no others."""
    actual = {name: value.shape for name, value in state.items()}
    names = expected.keys() | actual.keys()
    wrong = sorted(name for name in names if expected.get(name) != actual.get(name))
    if wrong:
        first = wrong[0]
        shapes = [
            "nothing" if shape is None else str(tuple(shape))
            for shape in (expected.get(first), actual.get(first))
        ]
        raise ValueError(
            f"the weights in {path} must be those that {description} asks for, but {len(wrong)} "
            f"are missing, unknown or of another shape: the first is {first}, expected "
            f"{shapes[0]}, found {shapes[1]}."
        )


Check = Callable[[str, Any], Any]
"""Converts the value of an option, or raises a ValueError with its name."""

Rule = tuple[Any, Callable[[Any], bool], str]
"""Rule of an option with only one supported meaning: its default, a check and a description."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of another framework's configuration, read and written by one table."""

    # By our field: the option, the framework's default, and what checks the value.
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Options that code converts, with the framework's defaults.
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # Written, and read as by `only`
    fixed: Mapping[str, Rule] = field(default_factory=dict)  # Read only
    written: Mapping[str, Any] = field(default_factory=dict)  # Not read
    # Training options without counterpart here, with the value that turns them off.
    training: Mapping[str, Any] = field(default_factory=dict)
    # Options that affect neither the function nor the objective, separated by spaces; if given,
    # all others are errors.
    ignored: str | None = None
    # What ``_target_`` is written as; read, its modules may be others.
    target: str | None = None

    def read(
        self, where: str, mapping: Any, unused: list[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Our fields, and `options`; the training options that are not used go to ``unused``."""
        check(isinstance(mapping, Mapping), where, "be a mapping", repr(mapping))
        self._check_names(where, mapping)
        constants = {key: only(value) for key, value in self.constants.items()}
        for key, (default, is_met, rule) in {**constants, **self.fixed}.items():
            value = mapping.get(key, default)
            if not is_met(value):
                raise ValueError(f"`{where}.{key}` must be {rule}, but is {_format(value)}.")
        for key, off in self.training.items():
            value = mapping.get(key)
            if unused is not None and value is not None and value != off:
                unused.append(f"{where}.{key} = {value}")
        fields = {}
        for ours, (option, default, *checks) in self.fields.items():
            value = mapping.get(option, default)
            for convert in checks:
                value = convert(f"{where}.{option}", value)
            fields[ours] = value
        return fields, {key: mapping.get(key, default) for key, default in self.options.items()}

    def write(self, config: object = None, **options: Any) -> dict[str, Any]:
        """All options: of our configuration's fields, and those that code converts."""
        fields = {option: getattr(config, ours) for ours, (option, *_) in self.fields.items()}
        target = {} if self.target is None else {"_target_": self.target}
        return {**target, **fields, **self.constants, **self.written, **options}

    def _check_names(self, where: str, mapping: Mapping[str, Any]) -> None:
        target, name = mapping.get("_target_"), str(self.target).rsplit(".", 1)[-1]
        if self.target and str(target).rsplit(".", 1)[-1] != name:
            raise ValueError(f"`{where}._target_` must be {name}, but is {_format(target)}.")
        if self.ignored is None:
            return
        existing = {option for option, *_ in self.fields.values()} | {"_target_"}
        existing |= {*self.options, *self.constants, *self.fixed, *self.written, *self.training}
        existing |= set(self.ignored.split())
        for key, value in mapping.items():
            rule = "be left out, as it is unknown here and may change what the model computes"
            check(key in existing or value is None, f"{where}.{key}", rule, repr(value))


def only(*values: Any, default: Any = None) -> Rule:
    """A rule that allows these values, the first of which is the default unless given."""
    names = " or ".join(_format(value) for value in values)
    return values[0] if default is None else default, lambda value: value in values, names


def integer(where: str, value: Any) -> int:
    """Check that an option is an integer, and no unresolved interpolation."""
    check(not isinstance(value, bool) and isinstance(value, int), where, "be an int", repr(value))
    return value


def one_of(*choices: int | str) -> Check:
    """Check that an option is one of these values."""

    def check(where: str, value: Any) -> Any:
        if isinstance(value, bool) or value not in choices:
            rule = " or ".join(map(str, choices))
            raise ValueError(f"`{where}` must be {rule}, but is {_format(value)}.")
        return value

    return check


def number(where: str, value: Any) -> float:
    """Check that an option is a number; null is 0."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{where}` must be a number, but is {value!r}.")
    return float(value)


def switch(where: str, value: Any) -> bool:
    """Check that an option is true or false."""
    check(isinstance(value, bool), where, "be true or false", repr(value))
    return value


def _format(value: Any) -> str:
    """A value as YAML and JSON write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def refuse(framework: str, reasons: Mapping[str, bool]) -> None:
    """Check that no reason holds against an export; the message lists all that do."""
    obstacles = [reason for reason, holds in reasons.items() if holds]
    if obstacles:
        raise ValueError(
            f"this model cannot be exported, because {framework} has no {'; no '.join(obstacles)}: "
            "choose another `--format`, or train a model with what is there."
        )


def refuse_experts(config: ModelConfig, framework: str) -> None:
    """Check that no part of a model has experts, which no other framework's model has."""
    parts = ("encoder", "decoder", "text_encoder")
    reasons = {
        f"{x}.experts": getattr(getattr(config, x), "experts", None) is not None for x in parts
    }
    prompt = config.language_prompt is not None and framework != "transformers"
    refuse(framework, {**reasons, "language_prompt": prompt})
    languages = config.language_adapters
    rule = f"be given, as {framework} has no adapters by language"
    remedy = f"such as --merge-language {languages[0]}" if languages else ""
    check(not languages, "--merge-language", rule, "not given", remedy)


def warn_about_parts(config: ModelConfig, exported: Collection[str], target: str) -> None:
    """Warn about each part of a model that an export to this class leaves out."""
    for part, name in (
        ("decoder", "decoder"),
        ("ctc", "CTC head"),
        ("transducer", "transducer"),
        ("text_encoder", "text encoder"),
    ):
        if getattr(config, part) and part not in exported:
            _log.warning("The %s is not exported: %s has none.", name, target)


def warn_about_options(options: Sequence[str]) -> None:
    """Warn about training options that the exported model does not have."""
    if options:
        _log.warning("Options of training are not exported: %s.", ", ".join(options))
