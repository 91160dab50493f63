"""Beam search of several streams, whose segments become final one after the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.nbest.hypothesis import Hypothesis


@dataclass(frozen=True, slots=True)
class OpenTranscript:
    """The likeliest transcript of what is not yet final.

    Attributes:
        tokens: Its tokens.
        frames: Frame of the stream at which each is said.
        read: Frames of the stream that it follows from.
    """

    tokens: tuple[int, ...]
    frames: tuple[int, ...]
    read: int


class BeamStreams(ABC):
    """Searches each stream as the search of whole utterances does, and keeps its hypotheses.

    As long as nothing is final, the hypotheses of a finished stream are those of the search of the
    whole utterance, whatever parts it comes in. Where a segment becomes final, hypotheses that
    contradict it are dropped, and the others continue with the likeliest one's score as zero. So
    the score of a segment is its log-probability after those before it.

    Attributes:
        beam: K, hypotheses of each stream.
        nbest: Complete hypotheses of a finished stream that are wanted, from 1 to ``beam``.
    """

    def __init__(self, slots: int, beam: int, nbest: int = 1):
        """Prepare a number of slots, each for a stream at a time."""
        self.beam, self.nbest = beam, nbest
        self._complete: list[list[Hypothesis] | None] = [None] * slots
        self._read = [0] * slots

    @torch.inference_mode()
    def start(self, slot: int) -> None:
        """Begin a stream in a slot."""
        self._complete[slot], self._read[slot] = None, 0
        self._begin(slot)

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[OpenTranscript]:
        """Continue the streams that have frames; return the open transcript of every slot.

        Args:
            encoded: (S, c, encoder width).
            frames: Real frames of each slot, which come first.
        """
        self._advance(encoded, frames)
        self._read = [before + new for before, new in zip(self._read, frames, strict=True)]
        return self._likeliest(list(range(len(frames))))

    @torch.inference_mode()
    def finish(self, slot: int) -> OpenTranscript:
        """End a stream: all of its frames are read."""
        self._complete[slot] = self._ended(slot)
        return self.transcript(slot)

    @torch.inference_mode()
    def transcript(self, slot: int) -> OpenTranscript:
        """Return the open transcript of a slot."""
        complete = self._complete[slot]
        if complete is None:
            return self._likeliest([slot])[0]
        tokens, frames = (complete[0].tokens, complete[0].frames) if complete else ((), ())
        return OpenTranscript(tokens, frames, self._read[slot])

    @torch.inference_mode()
    def commit(self, slot: int, count: int, since: int) -> list[Hypothesis]:
        """Make tokens of the open transcript final, and with them the frames before one.

        Args:
            slot: The slot.
            count: Tokens that are final; the others come at ``since`` or later.
            since: The first frame that is not final.

        Returns:
            What the hypotheses say before this frame, the final tokens first, with the scores of
            the whole hypotheses. Of equal transcripts only the likeliest is listed.
        """
        complete = self._complete[slot]
        every = self._hypotheses(slot) if complete is None else complete
        if not every:
            return []
        final = every[0].tokens[:count]
        listed: dict[tuple[int, ...], Hypothesis] = {}
        for one in every:
            said = count if _continues(one, final, since) else _said_before(one, since)
            text = one.tokens[:said]
            listed.setdefault(text, replace(one, tokens=text, frames=one.frames[:said]))
        if complete is None:
            self._keep(slot, final, since)
        else:
            base = every[0].score
            self._complete[slot] = [
                Hypothesis(
                    one.tokens[count:],
                    one.score - base,
                    one.rank - base,
                    frames=one.frames[count:],
                )
                for one in every
                if _continues(one, final, since)
            ]
        return list(listed.values())

    @abstractmethod
    def _begin(self, slot: int) -> None:
        """Begin a stream in a slot."""

    @abstractmethod
    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        """Continue the streams: see `step`."""

    @abstractmethod
    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        """Return the open transcripts of slots."""

    @abstractmethod
    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        """Return all hypotheses of an open stream, the best first."""

    @abstractmethod
    def _ended(self, slot: int) -> list[Hypothesis]:
        """Return the complete hypotheses of a stream without further frames, the best first."""

    @abstractmethod
    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        """Drop hypotheses that contradict final tokens, and these tokens from the others."""


def opened(
    labels: Tensor, frames: Tensor | None, best: Tensor, reads: Sequence[int]
) -> list[OpenTranscript]:
    """Return the likeliest hypotheses as open transcripts.

    Args:
        labels: int64 (N, K, longest), followed by -1.
        frames: int64 (N, K, longest); the searches of streams follow them.
        best: int64 (N,), the likeliest of each.
        reads: Frames that each has read.
    """
    assert frames is not None
    rows = torch.arange(len(best), device=best.device)
    pairs = zip(labels[rows, best].tolist(), frames[rows, best].tolist(), reads, strict=True)
    found = []
    for row, said, read in pairs:
        tokens = tuple(label for label in row if label >= 0)
        found.append(OpenTranscript(tokens, tuple(said[: len(tokens)]), read))
    return found


def keep_consistent(
    labels: Tensor, frames: Tensor | None, counts: Tensor, final: Sequence[int], since: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove final tokens from hypotheses that agree with them.

    Args:
        labels: int64 (N, K, longest), followed by -1.
        frames: int64 (N, K, longest); the searches of streams follow them.
        counts: int64 (N, K).
        final: Tokens that are final.
        since: The first frame that is not; a hypothesis that says more before it disagrees.

    Returns:
        Whether each agrees, bool (N, K); labels and frames with ``longest`` less by those that are
        final; and counts. Those that disagree have none.
    """
    assert frames is not None
    count = len(final)
    missing = max(0, count - labels.shape[-1])
    labels, frames = F.pad(labels, (0, missing), value=-1), F.pad(frames, (0, missing))
    agrees = counts >= count
    if count:
        first = torch.tensor(final, dtype=labels.dtype, device=labels.device)
        agrees &= (labels[..., :count] == first).all(-1)
    labels, frames = labels[..., count:], frames[..., count:]
    agrees &= ~((labels >= 0) & (frames < since)).any(-1)
    labels = labels.masked_fill(~agrees[..., None], -1)
    return agrees, labels, frames, torch.where(agrees, counts - count, 0)


def merged(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return hypotheses in order, with the scores of equal transcripts added."""
    found: dict[tuple[int, ...], Hypothesis] = {}
    for one in sorted(hypotheses, key=lambda one: -one.score):
        before = found.get(one.tokens)
        if before is None:
            found[one.tokens] = one
        else:
            score = before.score + math.log1p(math.exp(one.score - before.score))
            found[one.tokens] = replace(before, score=score, rank=score)
    return sorted(found.values(), key=lambda one: -one.score)


def _continues(one: Hypothesis, final: tuple[int, ...], since: int) -> bool:
    """Whether a hypothesis begins with final tokens, and says no more before a frame."""
    count = len(final)
    return one.tokens[:count] == final and all(frame >= since for frame in one.frames[count:])


def _said_before(one: Hypothesis, since: int) -> int:
    """The number of tokens that a hypothesis says before a frame."""
    return sum(frame < since for frame in one.frames)
