"""Confidence of each token of a transcript, whatever search has made it."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from effasr.decoding.ctc_alignment import align_tokens, pack_like
from effasr.model.asr import ASRModel
from effasr.model.transducer import Transducer
from effasr_kernels import PackedLayout, PackedSequence

ALPHA = 1 / 3  # order of the entropy, which worked best in the paper

_ROWS = 4096  # distributions that are computed at a time
_NONE = -np.inf

Confidences = tuple[float, ...] | None  # None if no path of the model spells the transcript


def entropy_confidence(log_probs: Tensor, alpha: float = ALPHA) -> Tensor:
    r"""Return the confidence in distributions (..., V), from 0 for uniform to 1 for certain ones.

    It is the Tsallis entropy with exponential normalization, in float64; lower orders alpha are
    more sensitive to unlikely classes:

    .. math:: H = \frac{\sum_v p_v^\alpha - 1}{1 - \alpha}, \quad
        c = \frac{e^{-H} - e^{-H_{max}}}{1 - e^{-H_{max}}}, \quad
        H_{max} = \frac{V^{1 - \alpha} - 1}{1 - \alpha}

    Laptev and Ginsburg, 2022, https://arxiv.org/abs/2212.08703.
    """
    if not 0 < alpha < 1 or log_probs.shape[-1] < 2:
        raise ValueError(
            "`alpha` must be between 0 and 1 and `log_probs` have at least 2 classes, but they are "
            f"{alpha} and {log_probs.shape[-1]}."
        )
    most = (log_probs.shape[-1] ** (1 - alpha) - 1) / (1 - alpha)
    entropy = ((alpha * log_probs.double()).exp().sum(-1) - 1) / (1 - alpha)
    least = math.exp(-most)
    return (((-entropy).exp() - least) / (1 - least)).clamp(0.0, 1.0)


@torch.no_grad()
def token_confidences(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[Confidences]:
    """Return the confidence of each token of the first sequences of encoder output.

    With ``attention`` it is that of the decoder's distribution of the token. With ``ctc`` it is the
    least of the frames of the token on the likeliest path, and with ``transducer`` that of the
    frame in which the likeliest path says it, of the distribution of labels and blank.
    """
    if method == "attention":
        return list(_of_decoder(model, encoded, prompts, texts))
    if method == "ctc":
        blocks = encoded.values.split(_ROWS)
        values = torch.cat([_confidences(model.ctc_logits(rows)) for rows in blocks]).cpu()
        sequences = encoded.with_values(values).unpack()
        return [
            None if spans is None else tuple(float(frames[a:b].min()) for a, b in spans)
            for frames, spans in zip(sequences, align_tokens(model, encoded, texts), strict=False)
        ]
    assert model.transducer is not None
    sequences = zip(texts, encoded.unpack(), strict=False)
    return [_of_transducer(model.transducer, rows, text) for text, rows in sequences]


def _of_decoder(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[tuple[float, ...]]:
    sequences = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    tokens = pack_like(sequences, encoded)
    hidden, _ = model.decode(tokens, encoded)
    blocks = hidden.split(_ROWS)
    values = [_confidences(model.logits(rows)[:, : model.vocab_size]) for rows in blocks]
    flat_values, begins = torch.cat(values).tolist(), tokens.layout.cu_seqlens_host
    return [
        tuple(flat_values[begin + len(prompt) - 1 : begin + len(prompt) - 1 + len(text)])
        for begin, prompt, text in zip(begins, prompts, texts, strict=False)
    ]


def _of_transducer(head: Transducer, rows: Tensor, text: Sequence[int]) -> Confidences:
    if not text:
        return ()
    if not len(rows):
        return None
    labels = torch.tensor(text, dtype=torch.int64, device=rows.device)
    layout = PackedLayout.from_lengths([len(text)], rows.device)
    predicted = head.predictor_projection(head.predictor(labels, layout))
    return transducer_confidences(head, rows, text, predicted)


@torch.no_grad()
def transducer_confidences(
    head: Transducer,
    rows: Tensor,  # encoder output, (T, encoder width)
    text: Sequence[int],  # U labels
    predicted: Tensor,  # (U + 1, J), the predictor's share before the first label and after each
) -> Confidences:
    if not text:
        return ()
    if not len(rows):
        return None
    labels = torch.tensor(text, dtype=torch.int64, device=rows.device)
    blank, label, of_durations, confidences = [], [], [], []
    # One utterance and some frames at a time, as the scores of all classes would be large.
    for frames in head.encoder_projection(rows).split(max(1, _ROWS // len(predicted))):
        logits = head.logits(frames[:, None], predicted[None]).float()
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        of_durations.append(logits[..., head.blank_id + 1 :].log_softmax(-1).double().cpu())
        confidences.append(entropy_confidence(symbols).cpu())
        blank.append(symbols[..., -1].double().cpu())
        index = labels[None, :, None].expand(len(frames), -1, 1)
        label.append(symbols[:, :-1].gather(2, index)[..., 0].double().cpu())
    durations = head.config.durations
    scores = torch.cat(blank).numpy(), torch.cat(label).numpy()
    duration_scores = None if durations is None else torch.cat(of_durations).numpy()
    frames_of = likeliest_frames(*scores, duration_scores, durations or ())
    if frames_of is None:
        return None
    return tuple(torch.cat(confidences)[frames_of, torch.arange(len(text))].tolist())


def _confidences(logits: Tensor) -> Tensor:
    return entropy_confidence(logits.float().log_softmax(-1))


def likeliest_frames(
    blank: np.ndarray,  # (T, U + 1), log-probabilities of the blank after u labels
    label: np.ndarray,  # (T, U), of label u after those before it
    of_durations: np.ndarray | None = None,  # (T, U + 1, D), of each duration
    durations: Sequence[int] = (),  # D of them, in frames
) -> list[int] | None:
    """Find the frame in which the likeliest path of a transducer says each label.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): with durations, a blank lasts at
    least one frame, a label must not reach the end, and a blank comes last. None without a path.
    """
    frames, count = blank.shape[0], label.shape[1]
    # (frames, log-probabilities), (T, U + 1) and (T, U)
    blanks, labels = [(1, blank)], [(0, label)]
    if of_durations is not None:
        scores = [(d, of_durations[..., n]) for n, d in enumerate(durations)]
        blanks = [(d, blank + score) for d, score in scores if d]
        labels = [(d, label + score[:, :count]) for d, score in scores]
    best = np.full((frames + 1, count + 1), _NONE)
    best[0, 0] = 0.0
    for frame in range(frames):
        row = best[frame]
        for duration, score in labels:
            if duration == 0:
                # Labels in a row in one frame: sums from any beginning.
                sums = np.concatenate([[0.0], score[frame].cumsum()])
                row[:] = np.maximum.accumulate(row - sums) + sums
        for duration, score in labels:
            if duration and frame + duration < frames:
                there = best[frame + duration]
                there[1:] = np.maximum(there[1:], row[:-1] + score[frame])
        for duration, score in blanks:
            if frame + duration <= frames:
                there = best[frame + duration]
                np.maximum(there, row + score[frame], out=there)
    if frames == 0 or best[frames, count] == _NONE:
        return [] if count == 0 else None
    path = [0] * count
    frame, after = frames, count
    while frame or after:
        steps = [
            (best[frame - d, after] + score[frame - d, after], frame - d, after)
            for d, score in blanks
            if frame >= d
        ]
        if after and frame < frames:
            steps += [
                (best[frame - d, after - 1] + score[frame - d, after - 1], frame - d, after - 1)
                for d, score in labels
                if frame >= d
            ]
        _, frame, before = max(steps)
        if before < after:
            path[before] = frame
        after = before
    return path


class StreamConfidences:
    """Aligns each segment of a stream with its frames, as `token_confidences` does with a whole.

    A transducer's predictor continues from the segments before. ``method`` is ctc or transducer.
    """

    def __init__(self, model: ASRModel, method: str):
        self._model, self._method = model, method
        self._rows: list[Tensor] = []
        self._first = 0
        with torch.inference_mode():
            self._predictor = None if model.transducer is None else model.transducer.begin(1)

    def add(self, encoded: Tensor) -> None:
        """Add the next frames, (frames, encoder width)."""
        # A view would keep the frames of all streams alive.
        self._rows.append(encoded.clone())

    def forget(self, before: int) -> None:
        if before > self._first:
            rows = torch.cat(self._rows)[before - self._first :]
            self._rows, self._first = [rows.clone()], before

    @torch.inference_mode()
    def of_segment(self, tokens: Sequence[int], end: int) -> Confidences:
        """Return the confidences of the next segment's tokens, which ends before a frame."""
        rows = torch.cat(self._rows)[: max(0, end - self._first)]
        if self._method == "ctc":
            packed = PackedSequence(rows, PackedLayout.from_lengths([len(rows)], rows.device))
            return token_confidences(self._model, "ctc", packed, [()], [tokens])[0]
        assert self._model.transducer is not None
        predicted = self._predicted(tokens)
        return transducer_confidences(self._model.transducer, rows, tokens, predicted)

    def _predicted(self, tokens: Sequence[int]) -> Tensor:
        """Let the predictor read tokens; returns its share before the first and after each."""
        head = self._model.transducer
        assert head is not None
        assert self._predictor is not None
        predicted, state = self._predictor
        shares = [predicted]
        for token in tokens:
            predicted, state = head.step(torch.tensor([token], device=predicted.device), state)
            shares.append(predicted)
        self._predictor = predicted, state
        return torch.cat(shares)
