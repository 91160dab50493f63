"""Forced alignment of tokens to frames by the likeliest CTC path."""

from collections.abc import Sequence

import numpy as np
import torch

from effasr.model.asr import ASRModel
from effasr_kernels import PackedLayout, PackedSequence

Span = tuple[int, int]  # first encoder frame, and the frame after the last


def pack_like(sequences: Sequence[Sequence[int]], like: PackedSequence) -> PackedSequence:
    """Pack token ids into as many sequences as those of ``like``, on its device."""
    device, count = like.values.device, like.layout.num_sequences
    layout = PackedLayout.from_lengths(list(map(len, sequences)), device, num_sequences=count)
    flat = [token for sequence in sequences for token in sequence]
    return PackedSequence(torch.tensor(flat, dtype=torch.int64, device=device), layout)


def align_tokens(
    model: ASRModel, encoded: PackedSequence, texts: Sequence[Sequence[int]]
) -> list[list[Span] | None]:
    """Return the spans of the tokens of each text, in order; None if it has too few frames."""
    spans: list[list[Span] | None] = []
    for text, rows in zip(texts, encoded.unpack(), strict=False):
        if not text:
            spans.append([])
            continue
        # One utterance at a time and only its own tokens: the scores of all classes would be large.
        scores = model.ctc_logits(rows).float().log_softmax(-1)
        classes = torch.tensor([model.vocab_size, *text], device=scores.device)
        spans.append(viterbi(scores[:, classes].cpu().numpy(), text))
    return spans


def viterbi(scores: np.ndarray, text: Sequence[int]) -> list[Span] | None:
    """Return the frames of each token on the likeliest CTC path; None where none spells the text.

    ``scores``: float (T, 1 + U), log-probabilities of the blank and of each token of the text.

    Graves et al., 2006, https://doi.org/10.1145/1143844.1143891.
    """
    count, frames = len(text), scores.shape[0]
    # States: blank, first token, blank, second token, ..., blank.
    emitted = np.repeat(scores[:, :1], 2 * count + 1, axis=1)
    emitted[:, 1::2] = scores[:, 1:]
    may_skip = np.zeros(2 * count + 1, dtype=bool)
    may_skip[3::2] = np.asarray(text[1:]) != np.asarray(text[:-1])
    if frames < count + int((~may_skip[3::2]).sum()):
        return None
    best = np.full(2 * count + 1, -np.inf)
    best[:2] = emitted[0, :2]
    came = np.zeros((frames, 2 * count + 1), dtype=np.int8)
    choices = np.full((3, 2 * count + 1), -np.inf)
    for frame in range(1, frames):
        choices[0] = best
        choices[1, 1:] = best[:-1]
        choices[2, 2:] = np.where(may_skip[2:], best[:-2], -np.inf)
        came[frame] = choices.argmax(axis=0)
        best = choices.max(axis=0) + emitted[frame]
    state = 2 * count if best[2 * count] >= best[2 * count - 1] else 2 * count - 1
    first, last = np.zeros(count, dtype=np.int64), np.full(count, -1)
    for frame in range(frames - 1, -1, -1):
        if state % 2:
            first[state // 2] = frame
            last[state // 2] = max(last[state // 2], frame)
        state -= int(came[frame, state])
    return [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
