"""Configuration of the experts of feed-forward networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from effasr.data.prompt import Prompt

Route = Literal["task", "language", "source", "learned"]
_ROUTES = get_args(Route)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Experts of every feed-forward network of a stack, each of the network's size.

    A row costs as much as in a model without experts, times ``top_k``; the memory of the weights
    grows with ``count``.

    Attributes:
        count: Number of experts.
        route: How a row chooses. ``task``: all rows of an utterance use the expert that bears the
            name of its task, transcribe or translate; ``language``: that of its source language;
            ``source``: that of what a text pair comes from, as its manifest line says in the field
            ``source``. ``learned``: a router of each network chooses for each row by its content.
        names: Unless ``learned``: the name of each expert, in order, such as ``de``.
        top_k: For ``learned``: experts of a row. With 1 the expert's output is multiplied by its
            probability (Switch Transformer); with more they are added with their probabilities,
            normalized to 1.
        balance: For ``learned``: weight of the loss that spreads rows evenly over the experts.
        z_loss: For ``learned``: weight of the mean squared logarithm of the router's normalizer,
            which keeps its logits small (ST-MoE).
    """

    count: int = 4
    route: Route = "learned"
    names: tuple[str, ...] = ()
    top_k: int = 1
    balance: float = 0.01
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.route not in _ROUTES:
            raise ValueError(f"`route` must be one of {', '.join(_ROUTES)}, but is {self.route!r}.")
        if self.count < 1:
            raise ValueError(f"`count` must be at least 1, but is {self.count}.")
        if not 1 <= self.top_k <= self.count:
            raise ValueError(f"`top_k` must be in 1 to count = {self.count}, but is {self.top_k}.")
        for name in ("balance", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, but is {getattr(self, name)}.")
        if self.is_learned:
            if self.names:
                raise ValueError(
                    f"`names` must be empty where a router chooses, but is {self.names}: leave it "
                    "out, or set `route` to task or source."
                )
            return
        if len(self.names) != self.count or len(set(self.names)) != self.count:
            raise ValueError(
                f"`names` must be {self.count} different names, one for each expert, but is "
                f"{self.names}: name the {self.route}s of the data, or change `count`."
            )
        if self.top_k != 1:
            raise ValueError(
                f"`top_k` must be 1 where the {self.route} chooses the expert, but is {self.top_k}."
            )

    @property
    def is_learned(self) -> bool:
        """Whether a router chooses."""
        return self.route == "learned"

    def number_of(self, prompt: Prompt, source: str | None = None) -> int:
        """Return the number of the expert that is named for an utterance or a text pair."""
        names = {"task": prompt.task, "language": prompt.source, "source": source}
        name = names[self.route]
        if name in self.names:
            return self.names.index(name)
        listed = f"one of {', '.join(self.names)}, which `experts.names` lists"
        if name is None:
            raise ValueError(
                f"the source of an utterance must be {listed}, but is not given: only lines of "
                "text pairs have a `source`. The route language chooses by `source_lang`."
            )
        raise ValueError(
            f"the {self.route} of an utterance must be {listed}, but is {name!r}: use one of "
            "these, or train an expert for it."
        )


def experts_of(stack: object) -> ExpertsConfig | None:
    """Return the experts of the configuration of an encoder or decoder; None for none."""
    return getattr(stack, "experts", None)


def named_experts_of(stack: object) -> ExpertsConfig | None:
    """Return them where names choose; else None."""
    experts = experts_of(stack)
    return None if experts is None or experts.is_learned else experts
