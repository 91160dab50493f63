"""Greedy and beam search of answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from effasr.data.conversation.batch import ConversationBatch
from effasr.decoding.decoded import Decoded
from effasr.decoding.language_model.cache import CachedConversations
from effasr.model.asr import ASRModel

_KEPT_SHARE = 7 / 8
"""Finished conversations are dropped once at most this share remains, as the rest is copied."""


@torch.no_grad()
def answers(
    model: ASRModel,
    batch: ConversationBatch,
    limits: Sequence[int],
    stop_ids: Collection[int],
    *,
    classes: int | None = None,
    beam: int = 1,
    length_penalty: float = 0.0,
) -> list[Decoded]:
    """Continue conversations that ask for an answer.

    The answer of a conversation does not depend on the others in the batch, up to rounding.

    Args:
        model: Model with a language model, in evaluation mode.
        batch: Conversations whose last row is the last that is given, on the model's device.
        limits: Most tokens of each answer, without its end; at least 1.
        stop_ids: Tokens that end an answer.
        classes: Number of the model's classes that are tokens; all by default.
        beam: K, hypotheses of each conversation; 1 for greedy search.
        length_penalty: With a beam, the exponent a by which an answer of score s and n tokens, its
            end included, ranks: ``s / ((5 + n) / 6) ** a``. An answer that ends goes before all
            that reach their limit.

    Returns:
        One answer for each of ``batch.ids``.

    Raises:
        ValueError: There is not one limit for each conversation, or one is less than 1.
    """
    if len(limits) != len(batch.ids) or min(limits, default=1) < 1:
        raise ValueError(
            f"`limits` must be {len(batch.ids)} numbers of at least 1, but are {list(limits)}."
        )
    if not limits:
        return []
    state = CachedConversations(model, batch)
    stops = frozenset(stop_ids)
    if beam == 1:
        return _greedy(state, limits, stops, classes)
    return _beam(state, limits, stops, classes, beam, length_penalty)


def _greedy(
    state: CachedConversations, limits: Sequence[int], stops: frozenset[int], classes: int | None
) -> list[Decoded]:
    texts: list[list[int]] = [[] for _ in limits]
    ended = [False] * len(limits)
    rows = list(range(len(limits)))
    while True:
        tokens = state.logits()[:, :classes].argmax(1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if ended[row] or len(texts[row]) >= limits[row]:
                continue
            if token in stops:
                ended[row] = True
            else:
                texts[row].append(token)
        going = [
            n for n, row in enumerate(rows) if not ended[row] and len(texts[row]) < limits[row]
        ]
        if not going:
            return [Decoded(tuple(x), not end) for x, end in zip(texts, ended, strict=True)]
        if len(going) <= _KEPT_SHARE * len(rows):
            state.select(going)
            rows, tokens = [rows[n] for n in going], tokens[going]
        state.read(tokens)


@dataclass(slots=True)
class _Hypotheses:
    """Hypotheses of one conversation.

    Attributes:
        limit: Most tokens of an answer.
        going: Score and tokens of those that go on.
        done: Rank and tokens of the best that has ended; None before one has.
    """

    limit: int
    going: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    done: tuple[float, tuple[int, ...]] | None = None


def _beam(
    state: CachedConversations,
    limits: Sequence[int],
    stops: frozenset[int],
    classes: int | None,
    beam: int,
    length_penalty: float,
) -> list[Decoded]:
    every = [_Hypotheses(limit) for limit in limits]
    active = list(every)

    def rank(score: float, length: int) -> float:
        return score / ((5 + length) / 6) ** length_penalty

    while True:
        log_probs = state.logits()[:, :classes].log_softmax(1)
        # As many of the best tokens may be stops.
        count = min(beam + len(stops), log_probs.shape[1])
        values, tokens = (x.tolist() for x in log_probs.topk(count, dim=1))
        rows: list[int] = []
        read: list[int] = []
        still: list[_Hypotheses] = []
        row = 0
        for one in active:
            found = []
            for score, text in one.going:
                for value, token in zip(values[row], tokens[row], strict=True):
                    found.append((score + value, token, text, row))
                row += 1
            found.sort(key=lambda item: (-item[0], item[1], item[3]))
            going: list[tuple[float, tuple[int, ...]]] = []
            own: list[tuple[int, int]] = []
            for score, token, text, parent in found:
                if token in stops:
                    ranked = rank(score, len(text) + 1)
                    if one.done is None or ranked > one.done[0]:
                        one.done = ranked, text
                elif len(going) < beam:
                    going.append((score, (*text, token)))
                    own.append((parent, token))
            one.going = going
            if _may_improve(one, rank):
                still.append(one)
                rows += [parent for parent, _ in own]
                read += [token for _, token in own]
        active = still
        if not active:
            break
        state.select(rows)
        state.read(torch.tensor(read, device=log_probs.device))
    return [
        Decoded(one.done[1]) if one.done is not None else Decoded(one.going[0][1], True)
        for one in every
    ]


def _may_improve(one: _Hypotheses, rank: Callable[[float, int], float]) -> bool:
    """Return whether a hypothesis that goes on may end with a better rank than the best."""
    score, text = one.going[0]
    if len(text) >= one.limit:
        return False
    # Scores only fall, and a longer answer is divided by more.
    return one.done is None or rank(score, one.limit) > one.done[0]
