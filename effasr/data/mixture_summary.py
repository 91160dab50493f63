"""Requested and realised shares of the sources of a mixture."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.mixture import MixConfig, leaves, shares
from effasr.data.sampling.population import Population, population

Unit = Literal["hours", "tokens"]
_PER_UNIT: dict[Unit, int] = {"hours": SAMPLE_RATE * 3600, "tokens": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Sources with their shares, and how much of each an epoch has."""

    names: tuple[str, ...]
    asked: tuple[float, ...]  # share of each source
    utterances: np.ndarray  # int64 (sources,)
    amounts: np.ndarray  # int64 (sources,), samples of audio; of text-only sources, tokens
    unit: Unit  # in which amounts are shown
    # samples or tokens of each in an epoch; None where an epoch has every utterance once, or is
    # what other data's epoch leaves room for
    quotas: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        mix: MixConfig,
        sources: np.ndarray,
        amounts: np.ndarray,
        *,
        unit: Unit = "hours",
        draws_tokens: bool = False,
    ) -> "Mixture":
        """Divide an epoch among sources.

        ``sources`` (n,) are numbers of `leaves`, ``amounts`` (n,) samples or tokens.
        ``draws_tokens``: an epoch that is measured in tokens has a quota of each source.
        """
        names, quotas = tuple(leaf.name for leaf in leaves(mix)), None
        utterances, by_source = _sums(sources, amounts, len(names))
        whole = int(by_source.sum())
        if mix.epoch == "full":
            requested = tuple(amount / whole for amount in by_source.tolist())
        else:
            requested = shares(mix, by_source.tolist())
            if unit == "hours":
                if mix.epoch_hours is not None:
                    whole = round(mix.epoch_hours * _PER_UNIT["hours"])
                quotas = tuple(round(share * whole) for share in requested)
            elif draws_tokens:
                if mix.epoch_hours is not None:
                    raise ValueError(
                        "`mix.epoch_hours` must be null where an epoch is measured in tokens, as "
                        "of conversations and of text pairs alone, but is "
                        f"{mix.epoch_hours}: leave it out."
                    )
                quotas = tuple(round(share * whole) for share in requested)
        return cls(names, requested, utterances, by_source, unit, quotas)

    def check(self, sources: Iterable[int]) -> None:
        """Refuse a mixture with nothing of one of these sources."""
        lacking = [self.names[n] for n in sorted(set(sources)) if not self.utterances[n]]
        if lacking:
            raise ValueError(
                "`mix`: every source must have an utterance that can be trained on, but "
                f"{', '.join(lacking)} has none: leave it out, or look at its manifests; "
                "`effasr prepare` lists what is dropped."
            )

    def populations(
        self, sources: np.ndarray, amounts: np.ndarray, *, seed: int
    ) -> Population | None:
        """Return a function from the epoch to its utterances, int32 (p,); None without quotas."""
        quotas = self.quotas
        if quotas is None:
            return None
        return lambda epoch: population(sources, amounts, quotas, seed=seed, epoch=epoch)

    def count(self, sources: np.ndarray, amounts: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return the draws of each source, int64 (2, sources): utterances and samples or tokens."""
        return np.stack(_sums(sources[indices], amounts[indices], len(self.names)))

    def summary(self, drawn: np.ndarray) -> "MixtureSummary":
        """Compare what is asked for with what was drawn, as `count` gives it."""
        whole, scale = max(int(drawn[1].sum()), 1), _PER_UNIT[self.unit]
        columns = zip(
            self.names,
            [self.unit] * len(self.names),
            self.utterances.tolist(),
            (self.amounts / scale).tolist(),
            self.asked,
            drawn[0].tolist(),
            (drawn[1] / scale).tolist(),
            (drawn[1] / whole).tolist(),
            strict=True,
        )
        return MixtureSummary(tuple(MixtureRow(*values) for values in columns if values[2]))


@dataclass(frozen=True, slots=True)
class MixtureRow:
    """A source in a `MixtureSummary`."""

    source: str
    unit: Unit
    utterances: int
    amount: float
    asked: float  # share
    drawn_utterances: int  # with repetitions
    drawn_amount: float
    realised: float  # share


@dataclass(frozen=True, slots=True)
class MixtureSummary:
    """The amounts drawn from every source."""

    rows: tuple[MixtureRow, ...]

    def mapping(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    def table(self) -> Iterator[str]:
        width = max(6, *(len(row.source) for row in self.rows))
        unit = self.rows[0].unit
        yield (
            f"{'source':{width}}  {unit:>9}  {'utterances':>10}  {'asked':>7}  {'drawn':>7}  times"
        )
        for row in self.rows:
            amount = f"{row.amount:9.2f}" if unit == "hours" else f"{row.amount:9.0f}"
            yield (
                f"{row.source:{width}}  {amount}  {row.utterances:10d}  {100 * row.asked:5.1f} %  "
                f"{100 * row.realised:5.1f} %  {row.drawn_amount / row.amount:5.2f}"
            )


def _sums(sources: np.ndarray, amounts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    utterances = np.bincount(sources, minlength=count)
    # Sums of integers below 2**53 are exact in float64, whatever their order.
    sums = np.bincount(sources, weights=amounts, minlength=count)
    return utterances.astype(np.int64), sums.astype(np.int64)
