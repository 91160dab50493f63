"""Benchmarks of losses with a projection to the vocabulary against other implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, Padding, leaf
from bench.workload import Workload

_SMOOTHING = 0.1


def cases(workload: Workload) -> list[Case]:
    """Cross-entropy of the decoder, first at the size of speech models, and CTC of the encoder."""
    return [
        cross_entropy(workload, 0.0, of_speech=True),
        cross_entropy(workload, _SMOOTHING),
        cross_entropy(workload, 0.0),
        ctc(workload),
    ]


def _weight(workload: Workload, classes: int) -> Tensor:
    return workload.draw(classes, workload.width, scale=workload.width**-0.5)


def cross_entropy(workload: Workload, smoothing: float, *, of_speech: bool = False) -> Case:
    """Return loss functions that sum over tokens; rows past the last token are ignored.

    Args:
        workload: The batch.
        smoothing: Smoothing of the labels.
        of_speech: Whether to use the size of a micro-batch of Canary flash: few tokens and few
            classes, so that all logits fit in memory and eager computes them once.
    """
    classes, tokens = workload.widths.vocabulary, workload.tokens
    if of_speech:
        classes, tokens = workload.widths.speech_classes, min(tokens, workload.widths.speech_tokens)
    hidden, weight = workload.draw(tokens, workload.width), _weight(workload, classes)
    targets = workload.labels(classes)[:tokens]
    targets[workload.token_layout.total :] = -100

    def contender(call: Callable[[], Tensor]) -> Contender:
        # The gradient of a mean over tokens, but for its scale.
        ones = torch.ones((), device=hidden.device)
        return Contender({"hidden": hidden, "weight": weight}, lambda: call().float(), [ones])

    def ours(backend: str) -> Contender:
        return contender(
            lambda: kernels.linear_cross_entropy(
                hidden,
                weight,
                targets,
                label_smoothing=smoothing,
                # As the model does; the other sizes measure the general case.
                uniform_gradient=of_speech,
                backend=backend,
            ).sum()
        )

    def eager() -> Contender:
        return contender(
            lambda: F.cross_entropy(
                F.linear(hidden, weight).float(),
                targets,
                reduction="sum",
                label_smoothing=smoothing,
            )
        )

    def chunked() -> Contender:
        if not hasattr(F, "linear_cross_entropy"):
            raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
        # With smoothing it warns, and computes all logits.
        options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return contender(
            lambda: F.linear_cross_entropy(  # type: ignore[attr-defined]
                hidden,
                weight,
                targets,
                reduction="sum",
                label_smoothing=smoothing,
                options=options,
            )
        )

    def liger() -> Contender:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyLoss,
        )

        loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
        return contender(lambda: loss(weight, hidden, targets))

    def cut() -> Contender:
        from cut_cross_entropy import (  # pyright: ignore[reportMissingImports]
            linear_cross_entropy,
        )

        # What it leaves out by default is small once a model has learnt, and here nearly all.
        return contender(
            lambda: linear_cross_entropy(hidden, weight, targets, reduction="sum", filter_eps=None)
        )

    shape = f"U={tokens} C={workload.width} V={classes}"
    peers = {"torch eager": eager, "Liger": liger}
    if not smoothing:
        peers |= {"torch chunked": chunked, "cut-cross-entropy": cut}
    kind = f"smoothing {smoothing:g}" if smoothing else "speech" if of_speech else ""
    return Case("linear_cross_entropy", kind, shape, ours, peers)


def ctc(workload: Workload) -> Case:
    """Return a loss for each utterance; the blank is the last class."""
    classes = workload.widths.vocabulary + 1
    frames, tokens = workload.frame_layout, workload.token_layout
    hidden, weight = workload.rows_of(frames, workload.width), _weight(workload, classes)
    targets = workload.labels(classes - 1)
    upstream = torch.ones(frames.num_sequences, device=hidden.device)

    def ours(backend: str) -> Contender:
        return Contender(
            {"hidden": hidden, "weight": weight},
            lambda: kernels.ctc_loss(
                hidden, weight, targets, frames, tokens, blank_id=classes - 1, backend=backend
            ),
            [upstream],
        )

    def torchs() -> Contender:
        padding = Padding(frames)
        rows, matrix = leaf(padding.pad(hidden)), leaf(weight)
        # Lengths on the host: torch would otherwise wait for them.
        frame_counts = padding.lengths.cpu()
        token_counts = torch.tensor([tokens.lengths[n] for n in padding.kept])
        labels = targets[: tokens.total]

        def call() -> Tensor:
            scores = F.linear(rows, matrix).float().log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(
                scores, labels, frame_counts, token_counts, classes - 1, reduction="none"
            )

        def packed(name: str, x: Tensor) -> Tensor:
            if name == "hidden":
                return padding.pack(x)
            if name == "weight":
                return x
            losses = x.new_zeros(frames.num_sequences)
            losses[torch.tensor(padding.kept, device=x.device)] = x
            return losses

        leaves = {"hidden": rows, "weight": matrix}
        return Contender(leaves, call, [upstream[: len(padding.kept)]], packed)

    shape = f"{workload.describe()} C={workload.width} V={classes}"
    return Case("ctc_loss", "", shape, ours, {"torch ctc_loss padded": torchs})
