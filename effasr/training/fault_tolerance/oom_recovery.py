"""Splits a micro-batch in two after an out-of-memory error."""

import gc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from effasr.data.batch import IGNORED, Batch
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.distributed.batch_norm import copies
from effasr.distributed.grad_sync import GradientSync
from effasr.training.memory import in_use
from effasr.training.seeds import micro_batch_seed, seed_generators
from effasr_kernels import PackedLayout, PackedSequence


def split(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch on the host between two utterances, into parts of similar size.

    The parts have no padding to a static shape, which would take memory.
    """
    count = len(batch.ids)
    if count < 2:
        raise ValueError(f"`batch` must have two utterances or more to be split, but has {count}.")
    sizes = [
        frames + tokens
        for frames, tokens in zip(batch.frames.lengths, batch.tokens.layout.lengths, strict=True)
    ]
    ends = list(accumulate(sizes[:count]))
    middle = min(range(1, count), key=lambda place: abs(2 * ends[place - 1] - ends[-1]))
    return utterances(batch, 0, middle), utterances(batch, middle, count)


def utterances(batch: Batch, begin: int, end: int) -> Batch:
    """Return utterances ``begin`` to ``end - 1`` of a batch, unchanged."""
    if isinstance(batch, ConversationBatch):
        return batch.part(begin, end)
    targets = _rows(batch.targets, batch.tokens.layout, begin, end)
    tokens = _sequences(batch.tokens, begin, end)
    monotonic = batch.monotonic[begin:end]
    audio = _sequences(batch.audio, begin, end)
    frames = PackedLayout.from_lengths(batch.frames.lengths[begin:end])
    text = _sequences(batch.text, begin, end)
    return replace(
        batch,
        audio=audio,
        frames=frames,
        tokens=tokens,
        targets=targets,
        text=text,
        monotonic=monotonic,
        ids=batch.ids[begin:end],
        audio_seconds=audio.layout.total / SAMPLE_RATE,
        num_targets=frames.total if batch.is_untranscribed else int((targets != IGNORED).sum()),
        num_monotonic_targets=int((text.layout.cu_seqlens.diff() + 1)[monotonic].sum()),
        frame_lengths=batch.frame_lengths[begin:end],
        token_lengths=batch.token_lengths[begin:end],
        label_room=None if batch.label_room is None else batch.label_room[begin:end],
        source=None if batch.source is None else _sequences(batch.source, begin, end),
        expert=None if batch.expert is None else batch.expert[begin:end],
        # Part of the static shape: for a part of the batch it would take memory.
        node_budget=None,
    )


def _sequences(packed: PackedSequence, begin: int, end: int) -> PackedSequence:
    values = _rows(packed.values, packed.layout, begin, end)
    return PackedSequence(values, PackedLayout.from_lengths(packed.layout.lengths[begin:end]))


def _rows(values: Tensor, layout: PackedLayout, begin: int, end: int) -> Tensor:
    offsets = layout.cu_seqlens_host
    # A copy, so that the whole tensor need not be kept for a part.
    return values[offsets[begin] : offsets[end]].clone(memory_format=torch.contiguous_format)


# Recovery from out-of-memory errors: a micro-batch that does not fit is computed in pieces.
#
# Losses are sums over tokens divided by the counts of the whole global step, so the gradients of
# the pieces add up to that of the micro-batch. Two things differ: dropout and augmentation use
# other random numbers, from a seed of the piece; and batch norms normalise each piece by its own
# mean and variance, as they would for a smaller micro-batch.

T = TypeVar("T")

_SIGNS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # Libraries that allocate memory themselves.
    "CUFFT_INTERNAL_ERROR",
    "CUFFT_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)

_WHOLE = (
    # oneDNN without memory for code or buffers; inside longer messages these mean other errors.
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",
)


class OutOfMemory(RuntimeError):
    """There is not enough memory, and splitting does not help; the message names the request."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An out-of-memory error: its message."""

    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Utterances of a micro-batch that are computed together: all of them or some."""

    batch: Batch  # The utterances, on the host
    seed: int  # Seed of dropout and augmentation
    begin: int = 0  # Index of the first utterance in the micro-batch

    def halves(self, reason: str) -> "tuple[Piece, Piece]":
        if len(self.batch.ids) < 2:
            raise OutOfMemory(_describe_unsplittable(self.batch, reason))
        first, second = split(self.batch)
        middle = self.begin + len(first.ids)
        return (
            Piece(first, micro_batch_seed(self.seed, self.begin, len(first.ids)), self.begin),
            Piece(second, micro_batch_seed(self.seed, middle, len(second.ids)), middle),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    piece: Piece  # The piece
    parts: Tensor  # The loss parts of the piece, (5,)
    losses: Tensor  # Loss of each utterance, (N,)


Gradient = Callable[[Batch], tuple[Sequence[Tensor | None], Tensor, Tensor]]
"""Returns gradients of a batch without changing ``grad``, the loss parts and the losses."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory | MemoryError):
        return True
    message = str(error).strip()
    is_sign = message in _WHOLE or any(sign in message for sign in _SIGNS)
    return isinstance(error, RuntimeError) and is_sign


def attempt(run: Callable[[], T]) -> T | Failure:
    """Call ``run``; after an out-of-memory error, free its memory and return a `Failure`."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
    # Outside the handler, because the error keeps its frames alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Failure(reason)


@dataclass(eq=False)
class OOMRecovery:
    """Runs the micro-batches of a step and recomputes the step in pieces if one does not fit."""

    _gradient: Gradient
    _grad_sync: GradientSync
    _statistics: Sequence[Tensor]
    _unsplittable_reason: str | None
    _device: torch.device

    def __post_init__(self) -> None:
        self._done: list[list[Outcome]] = []
        self.kept = copies(self._statistics)  # Copies of the statistics before the step
        self.splits = 0  # Number of pieces that were split

    @property
    def outcomes(self) -> list[Outcome]:
        """The pieces computed so far, in the order of their utterances."""
        return [outcome for pieces in self._done for outcome in pieces]

    def run(
        self, piece: Piece, run: Callable[[], tuple[Tensor, Tensor]], *, exchanging: bool
    ) -> None:
        seed_generators(piece.seed, self._device)
        result = attempt(run)
        if not isinstance(result, Failure):
            self._done.append([Outcome(piece, *result)])
            return
        if self._unsplittable_reason is not None:
            raise OutOfMemory(
                f"there is not enough memory for a micro-batch ({result.reason}), and "
                f"{self._unsplittable_reason}."
            )
        self._grad_sync.discard()
        work = [[outcome.piece for outcome in pieces] for pieces in self._done]
        # Compute the pieces of all micro-batches so far, and split those that do not fit.
        _restore(self._statistics, self.kept)
        sums: list[Tensor | None] = [None] * len(self._grad_sync.parameters)
        self._done = []
        for pieces in [*work, list(piece.halves(result.reason))]:
            self._done.append(self._recompute_micro_batch(pieces, sums))
            self.splits += len(self._done[-1]) - len(pieces)
        self.splits += 1
        self._grad_sync.replace(sums, exchanging=exchanging)

    def _recompute_micro_batch(
        self, pieces: Sequence[Piece], sums: list[Tensor | None]
    ) -> list[Outcome]:
        """Compute one micro-batch; add its gradients to ``sums``.

        The statistics become the mean over the pieces, weighted by frames.
        """
        before = [statistic.clone() for statistic in self._statistics]
        waiting, done, seen = deque(pieces), [], []
        while waiting:
            piece = waiting.popleft()
            _restore(self._statistics, before)
            seed_generators(piece.seed, self._device)
            result = attempt(partial(self._gradient, piece.batch))
            if isinstance(result, Failure):
                waiting.extendleft(reversed(piece.halves(result.reason)))
                continue
            gradients, parts, losses = result
            for index, gradient in enumerate(gradients):
                value = sums[index]
                if value is None:
                    sums[index] = gradient
                elif gradient is not None:
                    value += gradient
            done.append(Outcome(piece, parts, losses))
            seen.append([statistic.clone() for statistic in self._statistics])
        if len(done) > 1:
            frames = [outcome.piece.batch.frames.total for outcome in done]
            total = sum(frames)
            shares = [n / total if total else 1 / len(done) for n in frames]
            for statistic, values in zip(self._statistics, zip(*seen, strict=True), strict=True):
                terms = [share * value for share, value in zip(shares, values, strict=True)]
                statistic.copy_(torch.stack(terms).sum(0))
        return done


def gradients_of(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradient of each parameter without changing ``grad`` or calling DDP hooks."""
    result = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    # Both terms of a sum may share a gradient tensor; each parameter needs its own.
    local, used = [], set()
    for gradient in result:
        if gradient is not None:
            shared = gradient.data_ptr() in used
            gradient = gradient.clone() if shared else gradient.contiguous()
            used.add(gradient.data_ptr())
        local.append(gradient)
    return local


@torch.no_grad()
def _restore(statistics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for statistic, value in zip(statistics, values, strict=True):
        statistic.copy_(value)


def _describe_unsplittable(batch: Batch, reason: str) -> str:
    if not batch.ids:
        return f"there is not enough memory even for an empty micro-batch ({reason})."
    return (
        f"utterance {batch.ids[0]!r} alone does not fit in memory: it has {batch.frames.total} "
        f"encoder frames ({batch.audio_seconds:.1f} s) and {batch.tokens.layout.total} tokens; "
        f"{in_use()} ({reason}). Lower data.max_duration to drop such utterances, set "
        "training.activation_checkpointing=true, or train a smaller model."
    )
