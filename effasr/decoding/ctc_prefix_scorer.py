"""CTC prefix scores, for joint CTC/attention decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.decoding.ctc_greedy import ctc_log_probs
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_NONE = -torch.inf


@dataclass(frozen=True, slots=True)
class CTCPrefixScorer:
    """K prefixes of each of N utterances, with their CTC forward variables.

    The forward variables of a prefix are the log-probabilities of all paths over the first t frames
    that spell exactly it, t = 0 to the longest, by what the paths end with. They obey linear
    recurrences over the frames, which cumulative sums solve for all frames at once.

    Graves, 2012, https://doi.org/10.1007/978-3-642-24797-2, section 7.5.2; Watanabe et al., 2017,
    https://doi.org/10.1109/JSTSP.2017.2763455.
    """

    log_probs: Tensor  # float32 (V + 1, T), of each symbol, the blank last, at each packed frame
    rows: Tensor  # int64 (N, longest), the packed frame of each frame of each utterance
    lengths: Tensor  # int64 (N,), frames of each utterance
    last: Tensor  # int64 (N, K), the last token; -1 where there is none
    label: Tensor  # float64 (N, K, longest + 1), paths that end with the last token
    # float64 (N, K, longest + 1), paths that end with a blank, or with nothing at t = 0.
    blank: Tensor

    @classmethod
    def begin(
        cls, model: ASRModel, encoded: PackedSequence, count: int, beam: int
    ) -> CTCPrefixScorer:
        # The frames of a symbol are contiguous, because a prefix reads them together.
        log_probs = ctc_log_probs(model, encoded).t().contiguous()
        lengths = encoded.layout.lengths[:count]
        bounds = encoded.layout.cu_seqlens[:count].long()
        frames = torch.arange(max(lengths, default=0), device=bounds.device)
        # Frames past an utterance's end are read, but their results are not used.
        rows = (bounds[:, None] + frames).clamp(max=max(0, log_probs.shape[1] - 1))
        blank = log_probs[-1][rows].double().cumsum(1)[:, None].expand(-1, beam, -1)
        blank = torch.nn.functional.pad(blank, (1, 0))
        return cls(
            log_probs=log_probs,
            rows=rows,
            lengths=torch.tensor(lengths, device=bounds.device),
            last=torch.full((count, beam), -1, device=bounds.device),
            label=torch.full_like(blank, _NONE),
            blank=blank,
        )

    def extended(self, symbols: Tensor) -> Tensor:
        """Log-probabilities (N, K, C) of texts that start with a prefix and one of ``symbols``."""
        before = torch.logaddexp(self.label, self.blank)[:, :, None, :-1]
        repeats = (symbols == self.last[..., None])[..., None]
        before = torch.where(repeats, self.blank[:, :, None, :-1], before)
        past = torch.arange(self.rows.shape[1], device=symbols.device) >= self.lengths[:, None]
        first = before + self._at(symbols)
        return first.masked_fill(past[:, None, None], _NONE).logsumexp(-1)

    def complete(self) -> Tensor:
        """Return log-probabilities of the prefixes as complete transcripts, float64 (N, K)."""
        total = torch.logaddexp(self.label, self.blank)
        return total.gather(2, self.lengths[:, None, None].expand(*self.last.shape, 1))[..., 0]

    def advanced(self, parent: Tensor, label: Tensor) -> CTCPrefixScorer:
        """Continue with parents (N, K), each with one more label (N, K); -1 adds none."""
        row = torch.arange(len(parent), device=parent.device)[:, None]
        last, of_label, of_blank = (
            part[row, parent] for part in (self.last, self.label, self.blank)
        )
        total = torch.logaddexp(of_label, of_blank)
        before = torch.where((label == last)[..., None], of_blank, total)
        new_label = _solved(before, self._at(label.clamp(min=0)[..., None])[:, :, 0])
        blanks = self.log_probs[-1][self.rows].double()[:, None]
        new_blank = _solved(new_label, blanks.expand(-1, parent.shape[1], -1))
        stays = label < 0
        return replace(
            self,
            last=torch.where(stays, last, label),
            label=torch.where(stays[..., None], of_label, new_label),
            blank=torch.where(stays[..., None], of_blank, new_blank),
        )

    def keep(self, index: Tensor) -> CTCPrefixScorer:
        names = "rows", "lengths", "last", "label", "blank"
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def _at(self, symbols: Tensor) -> Tensor:
        """Log-probabilities of tokens at all frames: int64 (N, K, C) to float64 (N, K, C, t)."""
        return self.log_probs[symbols[..., None], self.rows[:, None, None]].double()


def _solved(inflow: Tensor, steps: Tensor) -> Tensor:
    """Solve y[t] = log(exp y[t - 1] + exp inflow[t - 1]) + x[t], with nothing at t = 0.

    Without its own steps x, y is a running sum of the inflow without the steps so far. float64 is
    precise enough to subtract the steps and to add them again.

    ``inflow``: float64 (N, K, longest + 1); ``steps``: x, float64 (N, K, longest), finite.
    """
    so_far = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
    summed = (inflow - so_far)[..., :-1].logcumsumexp(-1)
    return torch.nn.functional.pad(summed, (1, 0), value=_NONE) + so_far
