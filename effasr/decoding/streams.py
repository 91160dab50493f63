"""Results of the searches of streams, and the base of those with a beam."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.decoding.hypothesis import Hypothesis


class Emitted(NamedTuple):
    """A token of a greedy search, and the frame of its chunk, from 0, at which it is emitted."""

    token: int
    frame: int


@dataclass(frozen=True, slots=True)
class OpenTranscript:
    """The likeliest transcript of what is not yet final."""

    tokens: tuple[int, ...]
    frames: tuple[int, ...]  # of the stream, one for each token
    read: int  # frames of the stream that it follows from


class BeamStreams(ABC):
    """Searches each stream as the search of whole utterances does, and keeps its hypotheses.

    As long as nothing is final, the hypotheses of a finished stream are those of the search of the
    whole utterance, whatever parts it comes in. Where a segment becomes final, hypotheses that
    contradict it are dropped, and the others continue with the likeliest one's score as zero. So
    the score of a segment is its log-probability after the segments before it.
    """

    def __init__(self, model: nn.Module, slots: int, beam: int, nbest: int = 1):
        self.beam, self.nbest = beam, nbest
        self._device = next(model.parameters()).device
        self._complete: list[list[Hypothesis] | None] = [None] * slots
        self._read = [0] * slots

    @torch.inference_mode()
    def start(self, slot: int) -> None:
        self._complete[slot], self._read[slot] = None, 0
        self._begin(slot)

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[OpenTranscript]:
        """Continue streams by (S, c, encoder width), of which ``frames`` are real."""
        self._advance(encoded, frames)
        self._read = [before + new for before, new in zip(self._read, frames, strict=True)]
        return self._likeliest(list(range(len(frames))))

    @torch.inference_mode()
    def finish(self, slot: int) -> OpenTranscript:
        self._complete[slot] = self._ended(slot)
        return self.transcript(slot)

    @torch.inference_mode()
    def transcript(self, slot: int) -> OpenTranscript:
        complete = self._complete[slot]
        if complete is None:
            return self._likeliest([slot])[0]
        tokens, frames = (complete[0].tokens, complete[0].frames) if complete else ((), ())
        return OpenTranscript(tokens, frames, self._read[slot])

    @torch.inference_mode()
    def commit(self, slot: int, count: int, since: int) -> list[Hypothesis]:
        """Make the first ``count`` open tokens final, and with them the frames before ``since``.

        Returns what the hypotheses say before this frame, the final tokens first, with the scores
        of the whole hypotheses. Of equal transcripts only the likeliest is listed.
        """
        complete = self._complete[slot]
        hypotheses = self._hypotheses(slot) if complete is None else complete
        if not hypotheses:
            return []
        final = hypotheses[0].tokens[:count]
        listed: dict[tuple[int, ...], Hypothesis] = {}
        for hypothesis in hypotheses:
            length = count
            if not _continues(hypothesis, final, since):
                length = sum(frame < since for frame in hypothesis.frames)
            text, frames = hypothesis.tokens[:length], hypothesis.frames[:length]
            listed.setdefault(text, replace(hypothesis, tokens=text, frames=frames))
        if complete is None:
            self._keep(slot, final, since)
        else:
            base = hypotheses[0].score
            self._complete[slot] = [
                Hypothesis(
                    hypothesis.tokens[count:],
                    hypothesis.score - base,
                    hypothesis.rank - base,
                    frames=hypothesis.frames[count:],
                )
                for hypothesis in hypotheses
                if _continues(hypothesis, final, since)
            ]
        return list(listed.values())

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self._device)

    @abstractmethod
    def _begin(self, slot: int) -> None: ...

    @abstractmethod
    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None: ...

    @abstractmethod
    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]: ...

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
    labels: Tensor,  # int64 (N, K, longest), followed by -1
    frames: Tensor | None,  # int64 (N, K, longest)
    best: Tensor,  # int64 (N,), the likeliest hypothesis of each
    read: Sequence[int],  # frames that each has read
) -> list[OpenTranscript]:
    assert frames is not None
    rows = torch.arange(len(best), device=best.device)
    transcripts = []
    for label_row, frame_row, count in zip(
        labels[rows, best].tolist(), frames[rows, best].tolist(), read, strict=True
    ):
        tokens = tuple(label for label in label_row if label >= 0)
        transcripts.append(OpenTranscript(tokens, tuple(frame_row[: len(tokens)]), count))
    return transcripts


def keep_consistent(
    labels: Tensor,  # int64 (N, K, longest), followed by -1
    frames: Tensor | None,  # int64 (N, K, longest)
    counts: Tensor,  # int64 (N, K)
    final: Sequence[int],
    since: int,  # the first frame that is not final
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Remove final tokens from hypotheses that agree with them.

    Returns whether each agrees, bool (N, K), and its labels, frames and counts, which are empty for
    those that disagree. One that says more before ``since`` disagrees.
    """
    assert frames is not None
    count = len(final)
    missing = max(0, count - labels.shape[-1])
    labels, frames = F.pad(labels, (0, missing), value=-1), F.pad(frames, (0, missing))
    agrees = counts >= count
    if count:
        prefix = torch.tensor(final, dtype=labels.dtype, device=labels.device)
        agrees &= (labels[..., :count] == prefix).all(-1)
    labels, frames = labels[..., count:], frames[..., count:]
    agrees &= ~((labels >= 0) & (frames < since)).any(-1)
    labels = labels.masked_fill(~agrees[..., None], -1)
    return agrees, labels, frames, torch.where(agrees, counts - count, 0)


def merged(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return hypotheses in order, with the scores of equal transcripts added."""
    by_tokens: dict[tuple[int, ...], Hypothesis] = {}
    for hypothesis in sorted(hypotheses, key=lambda other: -other.score):
        likelier = by_tokens.get(hypothesis.tokens)
        if likelier is None:
            by_tokens[hypothesis.tokens] = hypothesis
        else:
            score = likelier.score + math.log1p(math.exp(hypothesis.score - likelier.score))
            by_tokens[hypothesis.tokens] = replace(likelier, score=score, rank=score)
    return sorted(by_tokens.values(), key=lambda other: -other.score)


def _continues(hypothesis: Hypothesis, final: tuple[int, ...], since: int) -> bool:
    """Whether a hypothesis begins with final tokens, and says no more before a frame."""
    count, frames = len(final), hypothesis.frames
    return hypothesis.tokens[:count] == final and all(frame >= since for frame in frames[count:])
