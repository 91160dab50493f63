"""A micro-batch for which there is not enough memory, made good in smaller pieces.

Losses are sums over tokens divided by the counts of the whole global step, so a micro-batch has
the gradient that its pieces have together. Two things are not the same to the last bit: dropout
and augmentation draw other random numbers, from a seed of the piece; and where the model has batch
norms, each piece is normalised by its own mean and variance, as a smaller micro-batch would be.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from effasr.data.batch import Batch
from effasr.training.fault_tolerance.batch_split import split
from effasr.training.memory import in_use

T = TypeVar("T")

_SIGNS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # What libraries say that allocate by themselves.
    "CUFFT_INTERNAL_ERROR",
    "CUFFT_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)

_WHOLE = (
    # oneDNN's, where there is no room for code or buffers. With more words they mean other things.
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
)


class OutOfMemory(RuntimeError):
    """There is not enough memory, and no way around it; the message says for what."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something for which there was not enough memory: what the error said."""

    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Utterances of a micro-batch that are computed together: at best all of them.

    Attributes:
        batch: On the host.
        seed: Of dropout and augmentation.
        begin: Place in the micro-batch of the first utterance.
    """

    batch: Batch
    seed: int
    begin: int = 0

    def halves(self, reseed: Callable[[int, int, int], int], reason: str) -> tuple[Piece, Piece]:
        """Two smaller pieces.

        Args:
            reseed: Makes the seed of a half: of this seed, its first utterance and their number.
            reason: Why there must be two.

        Raises:
            OutOfMemory: It is a single utterance, or none.
        """
        if len(self.batch.ids) < 2:
            raise OutOfMemory(_alone(self.batch, reason))
        first, second = split(self.batch)
        middle = self.begin + len(first.ids)
        return (
            Piece(first, reseed(self.seed, self.begin, len(first.ids)), self.begin),
            Piece(second, reseed(self.seed, middle, len(second.ids)), middle),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a piece came to, but for its gradient.

    Attributes:
        piece: Which.
        parts: Its share of the losses, (5,).
        losses: Of each of its utterances, (N,).
    """

    piece: Piece
    parts: Tensor
    losses: Tensor


@dataclass(frozen=True, slots=True)
class Redone:
    """Micro-batches that were computed once more.

    Attributes:
        outcomes: Of the pieces of each.
        gradients: Their sum for each parameter; None where nothing reached it.
        splits: How often a piece was split.
    """

    outcomes: list[list[Outcome]]
    gradients: list[Tensor | None]
    splits: int


Gradient = Callable[[Batch], tuple[Sequence[Tensor | None], Tensor, Tensor]]
"""Of a batch: gradients of the parameters, kept apart from ``grad``; parts; losses."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory | MemoryError):
        return True
    said = str(error).strip()
    is_sign = said in _WHOLE or any(sign in said for sign in _SIGNS)
    return isinstance(error, RuntimeError) and is_sign


def attempt(run: Callable[[], T]) -> T | Failure:
    """Run something, unless there is not enough memory for it: then what it held is free again."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
    # Here, and not above: as long as there is the error, there are the frames that it came from.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Failure(reason)


def redo(
    work: Sequence[Sequence[Piece]],
    gradient: Gradient,
    reseed: Callable[[int, int, int], int],
    statistics: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> Redone:
    """Compute micro-batches from the first on, and split what does not fit.

    From the first, because a backward that fails has added a part of its gradient, which nothing
    can take back; and apart from ``grad``, so that another failure spoils nothing.

    Args:
        work: The pieces of each micro-batch.
        gradient: Computes a piece.
        reseed: As in `Piece.halves`.
        statistics: Of the model's batch norms.
        kept: What they were before the first micro-batch.

    Raises:
        OutOfMemory: There is not enough memory for a single utterance.
    """
    _set(statistics, kept)
    sums = _Sums()
    outcomes, splits = [], 0
    for pieces in work:
        done = _redo_one(pieces, gradient, reseed, statistics, sums)
        splits += len(done) - len(pieces)
        outcomes.append(done)
    return Redone(outcomes, sums.values, splits)


def _redo_one(
    pieces: Sequence[Piece],
    gradient: Gradient,
    reseed: Callable[[int, int, int], int],
    statistics: Sequence[Tensor],
    sums: _Sums,
) -> list[Outcome]:
    """Of one micro-batch; its statistics become the mean of its pieces', weighed by frames."""
    before = [statistic.clone() for statistic in statistics]
    waiting, done, seen = deque(pieces), [], []
    while waiting:
        piece = waiting.popleft()
        _set(statistics, before)
        torch.manual_seed(piece.seed)
        result = attempt(partial(gradient, piece.batch))
        if isinstance(result, Failure):
            waiting.extendleft(reversed(piece.halves(reseed, result.reason)))
            continue
        gradients, parts, losses = result
        sums.add(gradients)
        done.append(Outcome(piece, parts, losses))
        seen.append([statistic.clone() for statistic in statistics])
    if len(done) > 1:
        frames = [outcome.piece.batch.frames.total for outcome in done]
        whole = sum(frames)
        shares = [n / whole if whole else 1 / len(done) for n in frames]
        for statistic, values in zip(statistics, zip(*seen, strict=True), strict=True):
            terms = [share * value for share, value in zip(shares, values, strict=True)]
            statistic.copy_(torch.stack(terms).sum(0))
    return done


class _Sums:
    """Gradients of the parameters while pieces add to them."""

    def __init__(self) -> None:
        self.values: list[Tensor | None] = []

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        if not self.values:
            self.values = list(gradients)
            return
        for place, gradient in enumerate(gradients):
            value = self.values[place]
            if value is None:
                self.values[place] = gradient
            elif gradient is not None:
                value += gradient


def gradients_of(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradient of each parameter, without a change to its ``grad``, nor a call of its hooks."""
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    # Of a sum, both terms may be given the same tensor; what is added to one is not the other's.
    own, taken = [], set()
    for gradient in found:
        if gradient is not None:
            shared = gradient.data_ptr() in taken
            gradient = gradient.clone() if shared else gradient.contiguous()
            taken.add(gradient.data_ptr())
        own.append(gradient)
    return own


@torch.no_grad()
def _set(statistics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for statistic, value in zip(statistics, values, strict=True):
        statistic.copy_(value)


def _alone(batch: Batch, reason: str) -> str:
    if not batch.ids:
        return f"there is not even memory for a micro-batch without utterances ({reason})."
    return (
        f"utterance {batch.ids[0]!r} alone does not fit in memory: it has {batch.frames.total} "
        f"encoder frames ({batch.audio_seconds:.1f} s) and {batch.tokens.layout.total} tokens; "
        f"{in_use()} ({reason}). Lower data.max_duration to leave such utterances out, set "
        "training.activation_checkpointing=true, or train a smaller model."
    )
