"""Configuration of a mixture of sources, and the share of each.

A source is a set of manifests or a level of further sources. Where nothing else is said, the
sources of a level share it in proportion to ``hours ** temperature``: 1 leaves the data as they
are, 0 makes all sources equal, and what is between gives small ones more than they have.

References:
    Żelasko et al., EMMeTT: efficient multimodal machine translation training, 2024,
    https://arxiv.org/abs/2409.13523.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from effasr.checks import check

Paths = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A source: manifests, or further sources.

    Attributes:
        manifests: Manifests of any kind that `effasr.data.manifest.reader.read` takes.
        sources: Further sources by name, a level of their own; a path or a list of paths stands
            for a source with these manifests.
        weight: The part of its level that the source gets, whatever its hours. Where every source
            of a level has a weight, only their ratios count; else the sources without one divide
            what the others leave.
        temperature: Temperature of the level of its sources; by default that of the level above.
    """

    manifests: Paths = field(default=(), metadata={"remote": True})
    sources: "dict[str, SourceConfig | Paths]" = field(default_factory=dict)
    weight: float | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        paths = (self.manifests,) if isinstance(self.manifests, str) else tuple(self.manifests)
        object.__setattr__(self, "manifests", paths)
        object.__setattr__(self, "sources", _checked_level(self.sources))
        if bool(self.manifests) == bool(self.sources):
            both = "both" if self.manifests else "neither"
            raise ValueError(
                f"a source must have either `manifests` or `sources`, but this one has {both}."
            )
        rule = "be greater than 0"
        remedy = "leave the source out to train without it"
        check(self.weight is None or self.weight > 0, "weight", rule, self.weight, remedy)
        _check_temperature(self.temperature)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixConfig:
    """The sources of a run, and what an epoch of them is.

    Attributes:
        sources: Sources by name; a path or a list of paths stands for a source with these
            manifests.
        temperature: Temperature of the top level, and of every level below that names none.
        epoch: ``infinite``: an epoch is a number of hours, of which every source contributes its
            share. Each is drawn without replacement until it is exhausted, then anew, and goes on
            in the next epoch where it stopped. ``full``: an epoch has every utterance once, so
            the shares are those of the corpora, whatever the weights.
        epoch_hours: Hours of an infinite epoch; by default what all sources have together.
    """

    sources: dict[str, SourceConfig | Paths] = field(default_factory=dict)
    temperature: float = 1.0
    epoch: Literal["infinite", "full"] = "infinite"
    epoch_hours: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _checked_level(self.sources))
        check(self.sources, "sources", "name at least one source", "empty")
        _check_temperature(self.temperature)
        if self.epoch not in ("infinite", "full"):
            raise ValueError(f"`epoch` must be 'infinite' or 'full', but is {self.epoch!r}.")
        if self.epoch_hours is not None and not self.epoch_hours > 0:
            raise ValueError(f"`epoch_hours` must be greater than 0, but is {self.epoch_hours}.")
        if self.epoch_hours is not None and self.epoch == "full":
            raise ValueError(
                f"`epoch_hours` must be null where `epoch` is 'full', but is {self.epoch_hours}: "
                "use `epoch: infinite`."
            )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A source with manifests; its name has the levels above it, such as ``de/mls``."""

    name: str
    manifests: tuple[str, ...]


def leaves(mix: MixConfig) -> tuple[Leaf, ...]:
    """Return the sources that have manifests, in the order of the configuration."""
    return tuple(_leaves(mix.sources, ""))


def shares(mix: MixConfig, amounts: Sequence[float]) -> tuple[float, ...]:
    """Return the share of the data of each source; the shares add up to 1.

    ``amounts`` are hours, or any other measure, of each of `leaves`; a source with nothing is left
    out of its level.
    """
    names = [leaf.name for leaf in leaves(mix)]
    if len(amounts) != len(names):
        raise ValueError(
            f"`amounts` must have {len(names)} entries, one per source, but has {len(amounts)}."
        )
    if not sum(amounts) > 0:
        raise ValueError("`amounts` must hold something of at least one source, but all are 0.")
    divided: dict[str, float] = dict.fromkeys(names, 0.0)
    _divide(mix.sources, "", mix.temperature, 1.0, dict(zip(names, amounts, strict=True)), divided)
    return tuple(divided.values())


def _children(level: Mapping[str, SourceConfig | Paths]) -> dict[str, SourceConfig]:
    """Return a level whose paths `_checked_level` has made sources."""
    return cast("dict[str, SourceConfig]", level)


def _leaves(level: Mapping[str, SourceConfig | Paths], prefix: str) -> Iterator[Leaf]:
    for name, source in _children(level).items():
        if source.sources:
            yield from _leaves(source.sources, f"{prefix}{name}/")
        else:
            yield Leaf(f"{prefix}{name}", cast("tuple[str, ...]", source.manifests))


def _divide(
    level: Mapping[str, SourceConfig | Paths],
    prefix: str,
    temperature: float,
    share: float,
    amounts: Mapping[str, float],
    divided: dict[str, float],
) -> None:
    """Divide the share of a level among its sources, and theirs among their own."""
    present = {
        name: (source, amount)
        for name, source in _children(level).items()
        if (amount := _amount(source, f"{prefix}{name}", amounts)) > 0
    }
    fixed = {name: source.weight for name, (source, _) in present.items() if source.weight}
    # Relative to the level, whose unit then does not matter even to the last bit.
    whole = sum(amount for _, amount in present.values())
    free = {
        name: (amount / whole) ** temperature
        for name, (_, amount) in present.items()
        if name not in fixed
    }
    fixed_sum, free_sum = sum(fixed.values()), sum(free.values())
    for name, (source, _) in present.items():
        if not free:
            part = fixed[name] / fixed_sum
        else:
            part = fixed.get(name) or (1 - fixed_sum) * free[name] / free_sum
        if source.sources:
            below = temperature if source.temperature is None else source.temperature
            _divide(source.sources, f"{prefix}{name}/", below, share * part, amounts, divided)
        else:
            divided[f"{prefix}{name}"] = share * part


def _amount(source: SourceConfig, name: str, amounts: Mapping[str, float]) -> float:
    if not source.sources:
        return amounts[name]
    return sum(
        _amount(child, f"{name}/{key}", amounts) for key, child in _children(source.sources).items()
    )


def _checked_level(level: Mapping[str, SourceConfig | Paths]) -> dict[str, SourceConfig]:
    sources = {}
    for name, source in level.items():
        if not name or "/" in name:
            raise ValueError(
                f"`sources` must have names without a slash, but one is {name!r}: nest `sources` "
                "for levels."
            )
        sources[name] = source
        if not isinstance(source, SourceConfig):
            sources[name] = SourceConfig(manifests=source)
    weights = [source.weight for source in sources.values()]
    total = sum(weight for weight in weights if weight)
    if None in weights and total >= 1:
        lacking = [name for name, source in sources.items() if source.weight is None]
        raise ValueError(
            f"`weight` of the sources of a level must add up to less than 1 where some have none, "
            f"but is {total:g} in all: nothing is left for {', '.join(lacking)}."
        )
    return sources


def _check_temperature(temperature: float | None) -> None:
    rule = "be at least 0"
    remedy = "1 keeps the proportions of the data, 0 makes all sources equal"
    check(temperature is None or temperature >= 0, "temperature", rule, temperature, remedy)
