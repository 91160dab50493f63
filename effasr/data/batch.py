"""The tensors of a micro-batch, and the static shape that all micro-batches of a run have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from effasr.checks import check
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr_kernels import PackedLayout, PackedSequence

IGNORED = -100  # target of a token row that no loss counts: a prompt, or the tail of a static shape

_SCALE = 2**15  # of samples of 16 bits

_LARGEST_JOINED = 2**20
"""Bytes of a tensor up to which copying it on the host costs less than a transfer of its own."""
_ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as with CUDA's allocator: kernels rely on 16."""


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The one shape of every batch of a run."""

    frame_budget: int  # T, encoder frames, the tail included
    token_budget: int  # U, decoder tokens (prompts and texts), the tail included
    max_sequences: int  # N, utterances, empty ones included
    longest_frames: int | None = None  # that no utterance exceeds; by default the budget
    longest_tokens: int | None = None  # that no utterance exceeds; by default the budget
    framing: Framing = FASTCONFORMER  # samples of an encoder frame
    # Capacity for the nodes of a transducer's lattices. An utterance counts with the product of its
    # frames and its tokens, of which the prompt has at least one: no fewer than its nodes. None
    # without a transducer
    node_budget: int | None = None

    def __post_init__(self) -> None:
        for name in ("frame_budget", "token_budget", "max_sequences"):
            check(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        if self.node_budget is not None and not 1 <= self.node_budget < 2**31:
            raise ValueError(
                f"`node_budget` must lie in 1 to 2**31 - 1, but is {self.node_budget}: lower the "
                "frame budget."
            )
        for name, budget in (("frames", self.frame_budget), ("tokens", self.token_budget)):
            if getattr(self, f"longest_{name}") is None:
                object.__setattr__(self, f"longest_{name}", budget)

    @property
    def audio_rows(self) -> int:
        """Samples of a batch, the tail included."""
        return self.framing.capacity(self.frame_budget, self.max_sequences)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the model needs for one forward and backward.

    All layouts have the same N; the sequences past ``len(ids)`` are empty.
    """

    # float32 (samples,), mono, at the model's sample rate; int16 on the host after `narrowed`
    audio: PackedSequence
    frames: PackedLayout  # layout of the encoder's output frames, T rows
    tokens: PackedSequence  # int64 (U,), decoder input: prompt, then transcript
    targets: Tensor  # int64 (U,), next token of each input; `IGNORED` in prompts and in the tail
    text: PackedSequence  # int64 (U',), the transcript alone, for CTC and the transducer
    # Whether the text follows the speech in order (a transcription, not a translation), bool (N,),
    # so that CTC and guided attention apply; else its text is empty
    monotonic: Tensor
    ids: tuple[str, ...]  # names of the utterances, in order
    audio_seconds: float  # their total duration in seconds
    num_targets: int  # rows of ``targets`` that a loss counts
    num_monotonic_targets: int  # rows of ``text``, which has no times, and an end of each text
    frame_lengths: tuple[int, ...]
    """Encoder frames of each utterance; ``frames`` also counts silence put after it."""
    token_lengths: tuple[int, ...]
    """Tokens of each utterance; ``tokens.layout`` also counts padding put after it."""
    source: PackedSequence | None = None
    """Text encoder input of a text-only batch, int64 (T,). Such a batch has no rows in ``audio``,
    and ``frames`` is the layout of ``source``."""
    label_room: Tensor | None = None
    """int64 (N,), tokens that the label of each utterance may have, 0 for one with a text; None
    where a teacher has nothing to label, or has done so."""
    node_budget: int | None = None  # see `StaticShape.node_budget`

    expert: Tensor | None = None
    """int64 (N,), the expert of each utterance, for a model whose experts names choose: the number
    of its task, source language or source among `ExpertsConfig.names`. 0 for an empty sequence;
    None where no expert is named."""

    @property
    def is_untranscribed(self) -> bool:
        """Whether no utterance has a text or room for one: frames are the targets."""
        return self.label_room is None and not any(self.token_lengths)

    @property
    def num_frames(self) -> int:
        return sum(self.frame_lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.token_lengths)

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch on another device; asynchronous from pinned memory.

        From the host to a device all tensors but the audio are one transfer; on the device they are
        views of one buffer. Audio is float32 there.
        """
        moved = self._moved(torch.device(device))
        audio = moved.audio
        if audio.values.dtype != torch.int16:
            return moved
        values = audio.values * (1 / _SCALE)
        return replace(moved, audio=PackedSequence(values, audio.layout))

    def narrowed(self) -> Self:
        """Return the batch with audio in int16, if that loses nothing: with samples of 16 bits.

        The samples of such a file are whole numbers in units of 2**-15; what was resampled, mixed
        or decoded from MP3 stays float32.
        """
        scaled = self.audio.values * _SCALE
        values = scaled.to(torch.int16)
        if not bool((values == scaled).all()):
            return self
        return replace(self, audio=PackedSequence(values, self.audio.layout))

    def _moved(self, device: torch.device) -> Self:
        if device.type == "cpu" or self.targets.device.type != "cpu":
            return self._mapped(lambda part: part.to(device=device, non_blocking=True))
        # A teacher's labels are on the device already, perhaps not computed yet.
        tensors: list[Tensor] = []
        see = lambda x: tensors.append(x) or x if x.is_cpu else x
        self._mapped(lambda part: _with_tensors(part, see))
        moved = {id(x): y for x, y in zip(tensors, _transferred(tensors, device), strict=True)}
        return self._mapped(lambda part: _with_tensors(part, lambda x: moved.get(id(x), x)))

    def pin_memory(self) -> Self:
        """Called by torch's DataLoader."""
        return self._mapped(lambda part: part.pin_memory())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor of the batch, in a fixed order."""
        return (
            self.audio.values,
            self.audio.layout.cu_seqlens,
            self.frames.cu_seqlens,
            self.tokens.values,
            self.tokens.layout.cu_seqlens,
            self.targets,
            self.text.values,
            self.text.layout.cu_seqlens,
            self.monotonic,
            *([] if self.source is None else [self.source.values]),
            *([] if self.expert is None else [self.expert]),
        )

    def rewritable(self) -> Self:
        """Return a copy in separate memory, which may be overwritten with another batch's tensors.

        Counts and names stay those of this batch.
        """
        audio, tokens, text = (
            PackedSequence(packed.values.clone(), packed.layout.rewritable())
            for packed in (self.audio, self.tokens, self.text)
        )
        frames, source = self.frames.rewritable(), self.source
        return replace(
            self,
            audio=audio,
            frames=frames,
            source=None if source is None else PackedSequence(source.values.clone(), frames),
            tokens=tokens,
            targets=self.targets.clone(),
            text=text,
            monotonic=self.monotonic.clone(),
            expert=None if self.expert is None else self.expert.clone(),
        )

    def _mapped(self, function: Callable[[Any], Any]) -> Self:
        names = ["audio", "frames", "tokens", "targets", "text", "monotonic"]
        names += [
            name for name in ("source", "label_room", "expert") if getattr(self, name) is not None
        ]
        return replace(self, **{name: function(getattr(self, name)) for name in names})


class BatchTransfer:
    """Copies batches to a GPU beside its work: on a stream of its own, two batches ahead.

    The host queues work before the GPU is there, so that a copy begins as soon as the memory of the
    batch before the last is free. A CUDA graph reads its inputs elsewhere: replaying needs no event
    but that of the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The end of all work up to the batch before the last, and the last batch, whose memory no
        # copy may have before its own work ends.
        self._free: Any = None
        self._last: Batch | None = None

    def __call__(self, batch: Batch) -> Batch:
        current = torch.cuda.current_stream(self._device)
        queued = current.record_event()
        with torch.cuda.stream(self._stream):
            if self._free is not None:
                self._stream.wait_event(self._free)
            moved = batch.to(self._device)
            arrived = self._stream.record_event()
        current.wait_event(arrived)
        self._free, self._last = queued, moved
        return moved


def _with_tensors(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, PackedSequence):
        layout = _with_tensors(part.layout, change)
        return PackedSequence(change(part.values), layout)
    if isinstance(part, PackedLayout):
        offsets = change(part.cu_seqlens)
        return PackedLayout(offsets, part.cu_seqlens_host, part.rows, part.static_max_seqlen)
    return change(part)


def _transferred(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors from the host to a device, the small ones in one transfer."""
    begins, end = [], 0
    for x in tensors:
        begins.append(end)
        if _is_small(x):
            end += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
    # A transfer from other memory than pinned one would wait for the device.
    pinned = device.type == "cuda" and all(x.is_pinned() for x in tensors if x.nbytes)
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)

    def part(whole: Tensor, x: Tensor, begin: int) -> Tensor:
        return whole[begin : begin + x.nbytes].view(x.dtype).view(x.shape)

    small = [(x, begin) for x, begin in zip(tensors, begins, strict=True) if _is_small(x)]
    for x, begin in small:
        part(buffer, x, begin).copy_(x)
    moved = buffer.to(device, non_blocking=True)
    return [
        part(moved, x, begin) if _is_small(x) else x.to(device, non_blocking=True)
        for x, begin in zip(tensors, begins, strict=True)
    ]


def _is_small(x: Tensor) -> bool:
    return x.nbytes <= _LARGEST_JOINED
