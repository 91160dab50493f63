"""Detects a CTC loss that is no lower than that of a head that ignores the audio."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.finding import Finding

SHARE = 0.9
"""Share of the loss without audio below which the model counts as using the audio."""

ENOUGH_FRAMES = 2.5
"""Median number of encoder frames per token below which CTC learns late or never."""

_MEMORY_STEPS = 25.0
"""Steps after which a loss has a weight of 1 / e in the running average."""


@dataclass(frozen=True, slots=True)
class CTCBaseline:
    """The CTC loss that can be reached without the audio.

    The best head that ignores it gives in each frame the same distribution: the blank with the
    share of frames that no token needs, and the tokens by their frequency. Its loss is the unigram
    entropy of the tokens, plus a little for the places of the blanks. CTC falls to this value at
    once, and stays there until it begins to align.

    Attributes:
        loss: Per target, in nats, as metrics.jsonl counts the CTC loss.
        entropy: Unigram entropy of the tokens, in nats.
        frames_per_token: Median over the utterances.
    """

    loss: float
    entropy: float
    frames_per_token: float

    @classmethod
    def of(cls, transcripts: Iterable[tuple[int, np.ndarray]]) -> CTCBaseline | None:
        """Compute the baseline from encoder frames and token ids, int (U,), of transcriptions.

        Returns:
            The baseline, or None if there are no tokens.
        """
        lengths, every = [], []
        for count, tokens in transcripts:
            if len(tokens):
                lengths.append((max(count, len(tokens)), len(tokens)))
                every.append(tokens)
        if not every:
            return None
        counts = np.bincount(np.concatenate(every)).astype(np.float64)
        shares = counts[counts > 0] / counts.sum()
        entropy = float(-(shares * np.log(shares)).sum())
        frames, tokens = np.array(lengths, dtype=np.float64).T
        emitted = tokens.sum() / frames.sum()
        placing = sum(_log_placements(int(t), int(u), emitted) for t, u in lengths)
        # The loss is divided by the targets of the decoder, of which the end token is one.
        loss = (entropy * tokens.sum() - placing) / (tokens + 1).sum()
        return cls(float(loss), entropy, float(np.median(frames / tokens)))


def _log_placements(frames: int, tokens: int, emitted: float) -> float:
    """Return the log-probability that ``tokens`` of the frames emit, each with a fixed chance."""
    ways = math.lgamma(frames + 1) - math.lgamma(tokens + 1) - math.lgamma(frames - tokens + 1)
    blanks = 0.0 if frames == tokens else (frames - tokens) * math.log1p(-emitted)
    return ways + tokens * math.log(emitted) + blanks


class CTCPlateau:
    """Compares the running average of the CTC loss with the loss without audio.

    Args:
        config: Epochs and steps before which there is no warning.
        baseline: CTC loss without audio on the training corpus.
        can_subsample_less: Whether the encoder can subsample by 4 instead of by 8.
    """

    def __init__(
        self, config: DiagnosticsConfig, baseline: CTCBaseline, *, can_subsample_less: bool
    ) -> None:
        self._config = config
        self._baseline = baseline
        self._can_subsample_less = can_subsample_less
        self._average: float | None = None

    @property
    def ratio(self) -> float | None:
        """The running average divided by the loss without audio; None before the first step."""
        return None if self._average is None else self._average / self._baseline.loss

    def observe(self, ctc: float, steps: int, step: int, epoch: int) -> Finding | None:
        """Update the running average; return a finding if CTC has not begun to align.

        Args:
            ctc: Mean CTC loss per target over the latest ``steps``, in nats.
            steps: Number of steps in that mean.
            step: Number of updates made.
            epoch: Number of complete epochs.
        """
        kept = math.exp(-steps / _MEMORY_STEPS)
        before = ctc if self._average is None else self._average
        self._average = kept * before + (1 - kept) * ctc
        base, config = self._baseline, self._config
        is_short = base.frames_per_token < ENOUGH_FRAMES
        if epoch < config.ctc_epochs or (not is_short and step < config.ctc_steps):
            return None
        if self._average < SHARE * base.loss:
            return None
        return Finding(
            "CTC has not begun to align",
            f"After {epoch} epochs its loss is {self._average:.2f} a token, and without the audio "
            f"it would be {base.loss:.2f} (unigram entropy of the tokens {base.entropy:.2f}). "
            f"Half of the utterances have fewer than {base.frames_per_token:.1f} encoder frames a "
            f"token{', which are too few' if is_short else ', which are enough'}.",
            self._remedy(is_short),
        )

    def _remedy(self, is_short: bool) -> str:
        if not is_short:
            return (
                "lower optimizer.lr or lengthen schedule.warmup_steps, and raise loss.ctc_weight; "
                "check that the texts belong to the audio."
            )
        vocabulary = "train a tokenizer with a larger vocabulary (effasr tokenizer --vocab-size)"
        if self._can_subsample_less:
            return f"set model.encoder.subsampling=4, or {vocabulary}, and begin anew."
        return f"{vocabulary}, and begin anew."

    def state_dict(self) -> dict[str, Any]:
        """Return the running average."""
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running average from a `state_dict`."""
        self._average = state["average"]
