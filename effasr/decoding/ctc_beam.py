"""CTC prefix beam search, over all utterances of a batch or over streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr.decoding.ctc_greedy import ctc_log_probs
from effasr.decoding.hypothesis import Batched, Hypothesis, NBest, mapped
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.streams import BeamStreams, OpenTranscript, keep_consistent, opened
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_NONE = -torch.inf


def ctc_beam(
    model: ASRModel,
    encoded: PackedSequence,  # (T, C), from ``model.encode``
    beam: int,
    lm: TokenLM | None = None,
    lm_weight: float = 0.0,
    nbest: int = 1,
    *,
    boost: BoostTree | None = None,
    with_frames: bool = False,  # whether hypotheses have the frames of their tokens: slower
) -> list[list[Hypothesis]]:
    """Find the likeliest transcripts of each sequence, the best first; for an empty one, no tokens.

    After each frame the ``beam`` likeliest prefixes are kept. The score of a prefix is the sum over
    all paths to it whose prefixes were kept, so the search is exact with a beam that is wide
    enough: unlike greedy search it finds the likeliest transcript, not the likeliest path. With a
    language model, ``lm_weight`` times its log-probability is added (shallow fusion), and so are
    the bonuses of ``boost``.

    Hannun et al., 2014, https://arxiv.org/abs/1408.2873.
    """
    lengths = encoded.layout.lengths
    # Sorted by length, the longest first, so that active utterances are always the first ones.
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    best = NBest(len(lengths), nbest)
    log_probs = ctc_log_probs(model, encoded)
    starts = encoded.layout.cu_seqlens[:-1].long()[torch.tensor(order, device=log_probs.device)]
    active = len(order)
    fusion = Fusion.of(lm, lm_weight, boost)
    prefixes = Prefixes.begin(active, beam, log_probs.device, with_frames=with_frames)
    for frame in range(encoded.layout.max_seqlen + 1):
        remaining = sum(lengths[n] > frame for n in order[:active])
        prefixes.record(order[remaining:active], remaining, fusion, best)
        active = remaining
        if not active:
            break
        steps = log_probs[starts[:active] + frame].double()
        prefixes = prefixes.keep(slice(active)).read(steps, frame, fusion)
    return best.lists


class CTCBeamStreams(BeamStreams):
    """Decodes as `ctc_beam`; a symbol is not repeated across segments either.

    The open transcript is the best one if the stream ended there. A language model reads each
    segment as a text of its own.
    """

    def __init__(
        self, model: ASRModel, slots: int, beam: int, nbest: int, fusion: Fusion | None = None
    ):
        super().__init__(model, slots, beam, nbest)
        self._model, self._fusion = model, fusion
        with torch.inference_mode():
            self._prefixes = Prefixes.begin(slots, beam, self._device, with_frames=True)

    def _begin(self, slot: int) -> None:
        self._put([slot], Prefixes.begin(1, self.beam, self._device, with_frames=True))

    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        logits = self._model.ctc_logits(encoded.flatten(0, 1))
        steps = logits.float().log_softmax(-1).double().view(*encoded.shape[:2], -1)
        for frame in range(max(frames)):
            slots = [slot for slot, count in enumerate(frames) if count > frame]
            numbers = torch.tensor([self._read[slot] + frame for slot in slots])
            at = numbers[:, None].to(self._device)
            if len(slots) == len(frames):
                self._prefixes = self._prefixes.read(steps[:, frame], at, self._fusion)
            else:
                part = self._prefixes.keep(self._index(slots))
                self._put(slots, part.read(steps[slots, frame], at, self._fusion))
        self._prefixes = self._prefixes.trimmed()

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        part = self._prefixes.keep(self._index(slots))
        best = part.ranks(self._fusion).argmax(1)
        return opened(part.labels, part.frames, best, [self._read[slot] for slot in slots])

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        return self._listed(slot, self.beam)

    def _ended(self, slot: int) -> list[Hypothesis]:
        return self._listed(slot, self.nbest)

    def _listed(self, slot: int, size: int) -> list[Hypothesis]:
        best = NBest(1, size)
        self._prefixes.keep(self._index([slot])).record([0], 0, self._fusion, best)
        return best.lists[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        part = self._prefixes.keep(self._index([slot]))
        agrees, labels, frames, counts = keep_consistent(
            part.labels, part.frames, part.counts, final, since
        )
        acoustic = torch.logaddexp(part.blank, part.label).masked_fill(~agrees, _NONE)
        best = (acoustic + part.lm).argmax(1, keepdim=True)
        base = acoustic.gather(1, best)
        consistent = replace(
            part,
            blank=(part.blank - base).masked_fill(~agrees, _NONE),
            label=(part.label - base).masked_fill(~agrees, _NONE),
            lm=(part.lm - part.lm.gather(1, best)).masked_fill(~agrees, 0),
            counts=counts,
            labels=labels,
            frames=frames,
            before=torch.full_like(part.before, final[-1]) if final else part.before,
        )
        self._put([slot], consistent)
        self._prefixes = self._prefixes.trimmed()

    def _put(self, slots: Sequence[int], part: Prefixes) -> None:
        self._prefixes = self._prefixes.put(self._index(slots), part)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is added to the scores of a search: a language model with a weight, and bonuses."""

    lm: TokenLM | None
    weight: float
    boost: BoostTree | None = None

    @classmethod
    def of(cls, lm: TokenLM | None, weight: float, boost: BoostTree | None) -> Fusion | None:
        return None if lm is None and boost is None else cls(lm, weight, boost)

    def scores(self, prefixes: Prefixes, symbols: Tensor) -> Tensor:
        """Score symbols (N, K, C) and, last, the end of the text: float64 (N, K, C + 1)."""
        bonuses = None
        if self.boost is not None:
            bonuses = self.boost.scores(prefixes.states, symbols).double()
        if self.lm is None:
            assert bonuses is not None
            return bonuses
        labels, counts = prefixes.labels, prefixes.counts
        position = counts[..., None] + torch.arange(-self.lm.order, 0, device=labels.device)
        if labels.shape[2]:
            context = labels.gather(2, position.clamp(min=0)).masked_fill(position < 0, -1)
        else:
            context = torch.full_like(position, -1)
        scores = self.weight * self.lm.scores(context, symbols)
        return scores if bonuses is None else scores + bonuses

    def ranked(self, steps: Tensor, prefixes: Prefixes) -> Tensor:
        """Return scores (N, V) by which tokens are candidates, with the most that any gains."""
        if self.boost is None:
            return steps
        rows = self.boost.rows(prefixes.states)[..., :-1]
        # A prefix that loses its bonus with most tokens must not hide the gains of others.
        return steps + (rows - self.boost.ends(prefixes.states)[..., None]).amax(1)


@dataclass(frozen=True, slots=True)
class Prefixes(Batched):
    """K different prefixes of each of N utterances; one with a score of -inf is an empty place."""

    # Log-probabilities, float64 (N, K):
    blank: Tensor  # of the paths that end with a blank, or of no frames
    label: Tensor  # of the paths that end with the prefix's last token
    lm: Tensor  # of the language model, weighted, and of the bonuses, or 0
    counts: Tensor  # int64 (N, K), tokens
    labels: Tensor  # int64 (N, K, longest), followed by -1
    # int64 (N, K, longest), the frame of each token on the likeliest path; None if not followed.
    frames: Tensor | None
    before: Tensor  # int64 (N,), the token that the prefixes continue; -1 for none
    states: Tensor  # int64 (N, K), of the phrases that bonuses are for

    @classmethod
    def begin(cls, count: int, beam: int, device: torch.device, *, with_frames: bool) -> Prefixes:
        none = torch.full((count, beam), _NONE, dtype=torch.float64, device=device)
        blank = none.clone()
        blank[:, 0] = 0
        counts = torch.zeros((count, beam), dtype=torch.int64, device=device)
        empty = counts.new_empty(count, beam, 0)
        before = counts.new_full((count,), -1)
        frames = empty if with_frames else None
        zeros = torch.zeros_like(none)
        return cls(blank, none, zeros, counts, empty, frames, before, counts.clone())

    def put(self, index: Tensor, part: Prefixes) -> Prefixes:
        """Replace the prefixes of some utterances, int64 (M,)."""
        longest = max(self.labels.shape[2], part.labels.shape[2])
        whole, part = self._padded(longest), part._padded(longest)
        return mapped(lambda old, new: old.index_copy(0, index, new), whole, part)

    def trimmed(self) -> Prefixes:
        """Return the same with no tokens in empty places, and no longer than the longest."""
        is_empty = torch.maximum(self.blank, self.label) == _NONE
        cleared = replace(
            self,
            counts=self.counts.masked_fill(is_empty, 0),
            labels=self.labels.masked_fill(is_empty[..., None], -1),
        )
        return cleared._padded(int(cleared.counts.max()))

    def _padded(self, longest: int) -> Prefixes:
        missing = longest - self.labels.shape[2]
        return replace(
            self,
            labels=F.pad(self.labels, (0, missing), value=-1),
            frames=None if self.frames is None else F.pad(self.frames, (0, missing)),
        )

    def ranks(self, fusion: Fusion | None) -> Tensor:
        """Return the scores of the prefixes as transcripts, float64 (N, K)."""
        scores = torch.logaddexp(self.blank, self.label) + self.lm
        if fusion is None:
            return scores
        no_symbols = self.counts.new_empty(*self.counts.shape, 0)
        return scores + fusion.scores(self, no_symbols)[..., 0]

    def record(
        self, utterances: Sequence[int], begin: int, fusion: Fusion | None, best: NBest
    ) -> None:
        """Record the best prefixes of the utterances from index ``begin`` on, as transcripts."""
        if begin == len(self.counts):
            return
        ended = self.keep(slice(begin, None))
        ranks = ended.ranks(fusion)
        scores, chosen = ranks.sort(dim=1, descending=True, stable=True)
        chosen = chosen[:, : best.size]
        row = torch.arange(len(ranks), device=chosen.device)[:, None]
        labels, frames = ended.labels[row, chosen].flatten(0, 1), ended.frames
        if frames is not None:
            frames = frames[row, chosen].flatten(0, 1)
        repeated = [utterance for utterance in utterances for _ in range(chosen.shape[1])]
        best.add_rows(repeated, labels, scores[:, : best.size].flatten(), frames=frames)

    def read(
        self,
        steps: Tensor,  # log-probabilities of tokens and blank, float64 (N, V + 1)
        frame: int | Tensor,  # number of the frame; int64 (N, 1) where it differs
        fusion: Fusion | None,
    ) -> Prefixes:
        beam = self.blank.shape[1]
        total = torch.logaddexp(self.blank, self.label)
        last = self._last()
        # A prefix stays the same after a blank or a repetition of its last token.
        again = steps.gather(1, last.clamp(min=0)).masked_fill(last < 0, _NONE)
        blank, label = total + steps[:, -1:], self.label + again
        # A prefix grows by a token. Without a language model 2 K candidates suffice: at most K - 1
        # of them give a prefix that already exists, and one is a repetition with a lower score.
        tokens, count = steps[:, :-1], min(2 * beam, steps.shape[1] - 1)
        if fusion is None or fusion.boost is None:
            likeliest, symbols = tokens.topk(count)
        else:
            symbols = fusion.ranked(tokens, self).topk(count).indices
            likeliest = tokens.gather(1, symbols)
        repeats = symbols[:, None] == last[..., None]
        grown = torch.where(repeats, self.blank[..., None], total[..., None]) + likeliest[:, None]
        follows = self._follows()
        # (N, b, a): prefix b is a with one more token, so the scores of both ways to it are added.
        before = torch.where(last[:, :, None] == last[:, None], self.blank[:, None], total[:, None])
        joined = (before + again[..., None]).masked_fill(~follows, _NONE)
        frames = self.frames
        if frames is not None:
            frames = self._repeated(frames, joined, torch.logaddexp(blank, label), frame)
        label = torch.cat([label[..., None], joined], -1).logsumexp(-1)
        # (N, a, C, b)
        same = symbols[:, None, :, None] == last[:, None, None]
        exists = (same & follows.transpose(1, 2)[:, :, None]).any(-1)
        grown = grown.masked_fill(exists, _NONE)
        lm = self.lm[..., None].expand_as(grown)
        if fusion is not None:
            lm = lm + fusion.scores(self, symbols[:, None].expand(-1, beam, -1))[..., :-1]
        acoustic = torch.cat([torch.logaddexp(blank, label), grown.flatten(1)], 1)
        lm = torch.cat([self.lm, lm.flatten(1)], 1)
        chosen = (acoustic + lm).topk(beam).indices
        unchanged = replace(self, blank=blank, label=label, frames=frames)
        acoustic, lm = acoustic.gather(1, chosen), lm.gather(1, chosen)
        boost = None if fusion is None else fusion.boost
        return self._chosen(chosen, unchanged, acoustic, lm, symbols, frame, boost)

    def _repeated(
        self,
        frames: Tensor,  # int64 (N, K, longest), of the prefixes so far
        joined: Tensor,  # (N, b, a), scores of prefix b as a and the token
        stays: Tensor,  # (N, b), scores of prefix b without the token in this frame
        frame: int | Tensor,
    ) -> Tensor:
        """Return the frames of prefixes, with the current one where it is likelier for the last."""
        if not self.labels.shape[2]:
            return frames
        likeliest, source = joined.max(-1)
        row = torch.arange(len(source), device=source.device)[:, None]
        now = torch.as_tensor(frame, device=source.device).expand_as(source)
        last = (self.counts - 1).clamp(min=0)[..., None]
        from_source = frames[row, source].scatter(2, last, now[..., None])
        return torch.where((likeliest > stays)[..., None], from_source, frames)

    def _chosen(
        self,
        chosen: Tensor,  # int64 (N, K), among K unchanged prefixes and K C that grow by a token
        unchanged: Prefixes,
        acoustic: Tensor,
        lm: Tensor,
        symbols: Tensor,
        frame: int | Tensor,
        boost: BoostTree | None,
    ) -> Prefixes:
        beam, candidates = self.blank.shape[1], symbols.shape[1]
        grows = chosen >= beam
        parent = torch.where(grows, (chosen - beam) // candidates, chosen)
        symbol = symbols.gather(1, (chosen - beam).clamp(min=0) % candidates)
        counts = self.counts.gather(1, parent)
        longest = int((counts + grows).max())
        row = torch.arange(len(parent), device=parent.device)[:, None]
        labels = _appended(self.labels[row, parent], counts, grows, symbol, longest, empty=-1)
        states = self.states.gather(1, parent)
        if boost is not None:
            states = boost.advanced(states, torch.where(grows, symbol, -1))
        frames = None
        if self.frames is not None and unchanged.frames is not None:
            # A prefix that grows continues the frames of its tokens before this frame.
            frames = torch.where(
                grows[..., None], self.frames[row, parent], unchanged.frames[row, parent]
            )
            now = torch.as_tensor(frame, device=frames.device).expand_as(grows)
            frames = _appended(frames, counts, grows, now, longest, empty=0)
        return Prefixes(
            blank=unchanged.blank.gather(1, parent).masked_fill(grows, _NONE),
            label=torch.where(grows, acoustic, unchanged.label.gather(1, parent)),
            lm=lm,
            counts=counts + grows,
            labels=labels,
            frames=frames,
            before=self.before,
            states=states,
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


def _appended(
    rows: Tensor,  # int64 (N, K, longest so far): tokens or frames of prefixes
    counts: Tensor,  # int64 (N, K), tokens so far
    grows: Tensor,  # bool (N, K)
    new: Tensor,  # int64 (N, K), appended where they grow
    longest: int,
    *,
    empty: int,
) -> Tensor:
    rows = F.pad(rows, (0, max(0, longest - rows.shape[2])), value=empty)
    if not rows.shape[2]:
        return rows
    # If nothing is added, a position is overwritten with its own value.
    end = counts.clamp(max=rows.shape[2] - 1)[..., None]
    return rows.scatter(2, end, torch.where(grows[..., None], new[..., None], rows.gather(2, end)))
