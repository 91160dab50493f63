"""Prefix beam search with CTC, over all utterances of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.ctc_greedy import ctc_log_probs
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_NONE = -torch.inf


def ctc_beam(
    model: ASRModel,
    encoded: PackedSequence,
    beam: int,
    lm: TokenLM | None = None,
    lm_weight: float = 0.0,
    nbest: int = 1,
    *,
    with_frames: bool = False,
) -> list[list[Hypothesis]]:
    """Find the likeliest transcripts of each sequence of encoder output.

    After each frame the ``beam`` likeliest prefixes are kept. The score of a prefix is the sum over
    all paths to it whose prefixes were kept, so the search is exact with a beam that is wide
    enough: unlike greedy search it finds the likeliest transcript, not the likeliest path. With a
    language model, ``lm_weight`` times its log-probability is added (shallow fusion).

    Args:
        model: Model with a CTC head; the blank is its last class.
        encoded: (T, C), from ``model.encode``.
        beam: K, prefixes of each sequence.
        lm: Language model over the same tokens; None for no language model.
        lm_weight: Weight of the language model, at least 0.
        nbest: Hypotheses of each sequence to return, from 1 to ``beam``.
        with_frames: Whether hypotheses have the frames of their tokens, which takes time.

    Returns:
        The hypotheses of each sequence, the best first: for an empty one the empty transcript.

    References:
        Hannun et al., 2014, https://arxiv.org/abs/1408.2873.
    """
    lengths = encoded.layout.lengths
    # Sorted by length, the longest first, so that active utterances are always the first ones.
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    found = NBest(len(lengths), nbest)
    log_probs = ctc_log_probs(model, encoded)
    starts = encoded.layout.cu_seqlens[:-1].long()[torch.tensor(order, device=log_probs.device)]
    going = len(order)
    fusion = None if lm is None else Fusion(lm, lm_weight)
    prefixes = Prefixes.begin(going, beam, log_probs.device, with_frames=with_frames)
    for frame in range(encoded.layout.max_seqlen + 1):
        on = sum(lengths[n] > frame for n in order[:going])
        prefixes.record(order[on:going], on, fusion, found)
        going = on
        if not going:
            break
        steps = log_probs[starts[:going] + frame].double()
        prefixes = prefixes.first(going).read(steps, frame, fusion)
    return found.lists()


@dataclass(frozen=True, slots=True)
class Fusion:
    """A language model, and its weight in the scores of a search."""

    lm: TokenLM
    weight: float

    def scores(self, labels: Tensor, counts: Tensor, symbols: Tensor) -> Tensor:
        """Weighted log-probabilities of the next tokens of prefixes: see `TokenLM.scores`."""
        place = counts[..., None] + torch.arange(-self.lm.order, 0, device=labels.device)
        if labels.shape[2]:
            context = labels.gather(2, place.clamp(min=0)).masked_fill(place < 0, -1)
        else:
            context = torch.full_like(place, -1)
        return self.weight * self.lm.scores(context, symbols)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """K different prefixes of each of N utterances; one with a score of -inf is an empty place.

    Attributes:
        blank: float64 (N, K), log-probability of the paths that end with a blank, or of no frames.
        label: float64 (N, K), of the paths that end with the prefix's last token.
        written: float64 (N, K), weighted log-probability of the language model, if any.
        counts: int64 (N, K), tokens.
        labels: int64 (N, K, longest), followed by -1.
        frames: int64 (N, K, longest), the frame at which each token is said on the likeliest path;
            None if the search does not follow them.
        before: int64 (N,), the token that the prefixes continue; -1 for none.
    """

    blank: Tensor
    label: Tensor
    written: Tensor
    counts: Tensor
    labels: Tensor
    frames: Tensor | None
    before: Tensor

    @classmethod
    def begin(cls, count: int, beam: int, device: torch.device, *, with_frames: bool) -> Prefixes:
        """Return the empty prefix of each utterance."""
        none = torch.full((count, beam), _NONE, dtype=torch.float64, device=device)
        blank = none.clone()
        blank[:, 0] = 0
        counts = torch.zeros((count, beam), dtype=torch.int64, device=device)
        empty = counts.new_empty(count, beam, 0)
        before = counts.new_full((count,), -1)
        frames = empty if with_frames else None
        return cls(blank, none, torch.zeros_like(none), counts, empty, frames, before)

    def first(self, count: int) -> Prefixes:
        """Return only the first utterances."""
        return self.keep(slice(count))

    def keep(self, index: Tensor | slice) -> Prefixes:
        """Return only these utterances, int64 (M,)."""
        return _mapped(lambda part: part[index], self)

    def put(self, index: Tensor, part: Prefixes) -> Prefixes:
        """Return prefixes of which those of some utterances, int64 (M,), are replaced."""
        longest = max(self.labels.shape[2], part.labels.shape[2])
        whole, part = self._with_room(longest), part._with_room(longest)
        return _mapped(lambda all_, some: all_.index_copy(0, index, some), whole, part)

    def trimmed(self) -> Prefixes:
        """Return the same with no tokens in empty places, and no room that none needs."""
        is_empty = torch.maximum(self.blank, self.label) == _NONE
        kept = replace(
            self,
            counts=self.counts.masked_fill(is_empty, 0),
            labels=self.labels.masked_fill(is_empty[..., None], -1),
        )
        return kept._with_room(int(kept.counts.max()))

    def _with_room(self, longest: int) -> Prefixes:
        room = longest - self.labels.shape[2]
        return replace(
            self,
            labels=F.pad(self.labels, (0, room), value=-1),
            frames=None if self.frames is None else F.pad(self.frames, (0, room)),
        )

    def ranks(self, fusion: Fusion | None) -> Tensor:
        """Return the scores of the prefixes as transcripts, float64 (N, K)."""
        scores = torch.logaddexp(self.blank, self.label) + self.written
        if fusion is None:
            return scores
        nothing = self.counts.new_empty(*self.counts.shape, 0)
        return scores + fusion.scores(self.labels, self.counts, nothing)[..., 0]

    def record(self, names: Sequence[int], begin: int, fusion: Fusion | None, found: NBest) -> None:
        """Record the best prefixes of the utterances from index ``begin`` on, as transcripts."""
        if begin == len(self.counts):
            return
        own = self.keep(slice(begin, None))
        scores = own.ranks(fusion)
        best, place = scores.sort(dim=1, descending=True, stable=True)
        place = place[:, : found.size]
        number = torch.arange(len(scores), device=place.device)[:, None]
        labels, frames = own.labels[number, place].flatten(0, 1), own.frames
        if frames is not None:
            frames = frames[number, place].flatten(0, 1)
        several = [name for name in names for _ in range(place.shape[1])]
        found.add_rows(several, labels, best[:, : found.size].flatten(), frames=frames)

    def read(self, steps: Tensor, frame: int | Tensor, fusion: Fusion | None) -> Prefixes:
        """Extend by a frame.

        Args:
            steps: Log-probabilities of tokens and blank, float64 (N, V + 1).
            frame: Number of the frame; one for all utterances, or int64 (N, 1).
            fusion: The language model, if any.
        """
        beam = self.blank.shape[1]
        every = torch.logaddexp(self.blank, self.label)
        last = self._last()
        # A prefix stays the same after a blank or a repetition of its last token.
        again = steps.gather(1, last.clamp(min=0)).masked_fill(last < 0, _NONE)
        blank, label = every + steps[:, -1:], self.label + again
        # A prefix grows by a token. Without a language model 2 K candidates suffice: at most K - 1
        # of them give a prefix that already exists, and one is a repetition with a lower score.
        likeliest, symbols = steps[:, :-1].topk(min(2 * beam, steps.shape[1] - 1))
        repeats = symbols[:, None] == last[..., None]
        grown = torch.where(repeats, self.blank[..., None], every[..., None]) + likeliest[:, None]
        follows = self._follows()
        # (N, b, a): prefix b is a with one more token, so the scores of both ways to it are added.
        before = torch.where(last[:, :, None] == last[:, None], self.blank[:, None], every[:, None])
        joined = (before + again[..., None]).masked_fill(~follows, _NONE)
        frames = self.frames
        if frames is not None:
            frames = self._said_again(frames, joined, torch.logaddexp(blank, label), frame)
        label = torch.cat([label[..., None], joined], -1).logsumexp(-1)
        # (N, a, C, b)
        same = symbols[:, None, :, None] == last[:, None, None]
        here = (same & follows.transpose(1, 2)[:, :, None]).any(-1)
        grown = grown.masked_fill(here, _NONE)
        written = self.written[..., None].expand_as(grown)
        if fusion is not None:
            candidates = symbols[:, None].expand(-1, beam, -1)
            written = written + fusion.scores(self.labels, self.counts, candidates)[..., :-1]
        heard = torch.cat([torch.logaddexp(blank, label), grown.flatten(1)], 1)
        written = torch.cat([self.written, written.flatten(1)], 1)
        chosen = (heard + written).topk(beam).indices
        unchanged = replace(self, blank=blank, label=label, frames=frames)
        heard, written = heard.gather(1, chosen), written.gather(1, chosen)
        return self._chosen(chosen, unchanged, heard, written, symbols, frame)

    def _said_again(
        self, frames: Tensor, joined: Tensor, stays: Tensor, frame: int | Tensor
    ) -> Tensor:
        """Return the frames of prefixes whose last token is rather said now than before.

        Args:
            frames: int64 (N, K, longest), of the prefixes so far.
            joined: (N, b, a), scores of prefix b as a and the token.
            stays: (N, b), scores of prefix b without the token being said now.
            frame: The current frame.
        """
        if not self.labels.shape[2]:
            return frames
        said, source = joined.max(-1)
        number = torch.arange(len(source), device=source.device)[:, None]
        now = torch.as_tensor(frame, device=source.device).expand_as(source)
        place = (self.counts - 1).clamp(min=0)[..., None]
        others = frames[number, source].scatter(2, place, now[..., None])
        return torch.where((said > stays)[..., None], others, frames)

    def _chosen(
        self,
        chosen: Tensor,
        unchanged: Prefixes,
        heard: Tensor,
        written: Tensor,
        symbols: Tensor,
        frame: int | Tensor,
    ) -> Prefixes:
        """Return the chosen prefixes, of K unchanged ones and K C that grow by a token."""
        beam, candidates = self.blank.shape[1], symbols.shape[1]
        grows = chosen >= beam
        parent = torch.where(grows, (chosen - beam) // candidates, chosen)
        symbol = symbols.gather(1, (chosen - beam).clamp(min=0) % candidates)
        counts = self.counts.gather(1, parent)
        longest = int((counts + grows).max())
        number = torch.arange(len(parent), device=parent.device)[:, None]
        labels = _appended(self.labels[number, parent], counts, grows, symbol, longest, empty=-1)
        frames = None
        if self.frames is not None and unchanged.frames is not None:
            # A prefix that grows goes on from where its tokens were said before this frame.
            said = torch.where(
                grows[..., None], self.frames[number, parent], unchanged.frames[number, parent]
            )
            now = torch.as_tensor(frame, device=said.device).expand_as(grows)
            frames = _appended(said, counts, grows, now, longest, empty=0)
        return Prefixes(
            blank=unchanged.blank.gather(1, parent).masked_fill(grows, _NONE),
            label=torch.where(grows, heard, unchanged.label.gather(1, parent)),
            written=written,
            counts=counts + grows,
            labels=labels,
            frames=frames,
            before=self.before,
        )

    def _last(self) -> Tensor:
        """Return the last token of each prefix, int64 (N, K), or the one before; -1 for none."""
        before = self.before[:, None].expand_as(self.counts)
        if not self.labels.shape[2]:
            return before
        last = self.labels.gather(2, (self.counts - 1).clamp(min=0)[..., None])[..., 0]
        return torch.where(self.counts == 0, before, last)

    def _follows(self) -> Tensor:
        """Return whether prefix b is prefix a with one more token: bool (N, b, a)."""
        alive = torch.maximum(self.blank, self.label) > _NONE
        follows = self.counts[:, :, None] == self.counts[:, None] + 1
        follows &= alive[:, :, None] & alive[:, None]
        if self.labels.shape[2]:
            before_last = (self.counts - 1).clamp(min=0)[..., None]
            shortened = self.labels.scatter(2, before_last, -1)
            follows &= (shortened[:, :, None] == self.labels[:, None]).all(-1)
        return follows


def _mapped(change: Callable[..., Tensor], *several: Prefixes) -> Prefixes:
    """Return prefixes of which every tensor is computed from those of others."""
    parts: dict[str, Any] = {}
    for name in [field.name for field in fields(Prefixes)]:
        own = [getattr(one, name) for one in several]
        parts[name] = None if own[0] is None else change(*own)
    return Prefixes(**parts)


def _appended(
    held: Tensor, counts: Tensor, grows: Tensor, new: Tensor, longest: int, *, empty: int
) -> Tensor:
    """Return tokens or frames of prefixes, (N, K, longest), and ``new``, (N, K), where they grow.

    Args:
        held: int64 (N, K, longest so far).
        counts: int64 (N, K), tokens so far.
        grows: bool (N, K).
        new: int64 (N, K).
        longest: Room that is needed.
        empty: What room is filled with.
    """
    held = F.pad(held, (0, max(0, longest - held.shape[2])), value=empty)
    if not held.shape[2]:
        return held
    # If nothing is added, a position is overwritten with its own value.
    place = counts.clamp(max=held.shape[2] - 1)[..., None]
    return held.scatter(
        2, place, torch.where(grows[..., None], new[..., None], held.gather(2, place))
    )
