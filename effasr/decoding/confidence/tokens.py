"""Confidence of each token of a transcript, whatever search has found it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.confidence.entropy import entropy_confidence
from effasr.decoding.confidence.transducer_alignment import likeliest_frames
from effasr.decoding.ctc_alignment import align_tokens
from effasr.model.asr import ASRModel
from effasr.model.transducer import Transducer
from effasr_kernels import PackedLayout, PackedSequence

_ROWS = 4096
"""Distributions that are computed at a time."""


@torch.no_grad()
def token_confidences(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[tuple[float, ...] | None]:
    """Return the confidence of each token: see `entropy_confidence`.

    With ``attention`` it is that of the decoder's distribution of the token. With ``ctc`` it is the
    least of the frames of the token on the likeliest path, and with ``transducer`` that of the
    frame in which the likeliest path says it, of the distribution of labels and blank.

    Args:
        model: The model, in evaluation mode.
        method: One of these three.
        encoded: (T, C), from ``model.encode``; sequences past ``len(texts)`` are ignored.
        prompts: Tokens that the attention decoder reads first.
        texts: Tokens of each transcript.

    Returns:
        The confidences of each transcript; None if no path of the model spells it.
    """
    if method == "attention":
        return list(_of_decoder(model, encoded, prompts, texts))
    if method == "ctc":
        return _of_ctc(model, encoded, texts)
    assert model.transducer is not None
    sequences = zip(texts, encoded.unpack(), strict=False)
    return [_of_transducer(model.transducer, rows, text) for text, rows in sequences]


def _of_decoder(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> list[tuple[float, ...]]:
    read = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    device = encoded.values.device
    layout = PackedLayout.from_lengths(
        list(map(len, read)), device, num_sequences=encoded.layout.num_sequences
    )
    flat = torch.tensor([t for row in read for t in row], dtype=torch.int64, device=device)
    hidden, _ = model.decode(PackedSequence(flat, layout), encoded)
    blocks = hidden.split(_ROWS)
    found = torch.cat([_confidences(model.logits(rows)[:, : model.vocab_size]) for rows in blocks])
    values, begins = found.tolist(), layout.cu_seqlens_host
    return [
        tuple(values[begin + len(prompt) - 1 : begin + len(prompt) - 1 + len(text)])
        for begin, prompt, text in zip(begins, prompts, texts, strict=False)
    ]


def _of_ctc(
    model: ASRModel, encoded: PackedSequence, texts: Sequence[Sequence[int]]
) -> list[tuple[float, ...] | None]:
    blocks = encoded.values.split(_ROWS)
    every = torch.cat([_confidences(model.ctc_logits(rows)) for rows in blocks]).cpu()
    frames = encoded.with_values(every).unpack()
    found: list[tuple[float, ...] | None] = []
    for own, spans in zip(frames, align_tokens(model, encoded, texts), strict=False):
        least = None if spans is None else tuple(float(own[a:b].min()) for a, b in spans)
        found.append(least)
    return found


def _of_transducer(head: Transducer, rows: Tensor, text: Sequence[int]) -> tuple[float, ...] | None:
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
    head: Transducer, rows: Tensor, text: Sequence[int], predicted: Tensor
) -> tuple[float, ...] | None:
    """Return the confidence of each label of one transcript by a transducer.

    Args:
        head: Transducer of the model.
        rows: Encoder output, (T, encoder width).
        text: U labels.
        predicted: (U + 1, J), the predictor's share before the first label and after each.

    Returns:
        The confidences; None if no path spells the transcript.
    """
    if not text:
        return ()
    if not len(rows):
        return None
    labels = torch.tensor(text, dtype=torch.int64, device=rows.device)
    blank, label, lasting, sure = [], [], [], []
    # One utterance and some frames at a time, as the scores of all classes would be large.
    for frames in head.encoder_projection(rows).split(max(1, _ROWS // len(predicted))):
        logits = head.logits(frames[:, None], predicted[None]).float()
        symbols = logits[..., : head.blank_id + 1].log_softmax(-1)
        lasting.append(logits[..., head.blank_id + 1 :].log_softmax(-1).double().cpu())
        sure.append(entropy_confidence(symbols).cpu())
        blank.append(symbols[..., -1].double().cpu())
        said = labels[None, :, None].expand(len(frames), -1, 1)
        label.append(symbols[:, :-1].gather(2, said)[..., 0].double().cpu())
    durations = head.config.durations
    scores = torch.cat(blank).numpy(), torch.cat(label).numpy()
    lasts = None if durations is None else torch.cat(lasting).numpy()
    frames_of = likeliest_frames(*scores, lasts, durations or ())
    if frames_of is None:
        return None
    return tuple(torch.cat(sure)[frames_of, torch.arange(len(text))].tolist())


def _confidences(logits: Tensor) -> Tensor:
    return entropy_confidence(logits.float().log_softmax(-1))
