"""Greedy search of the attention decoder with continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from effasr import ranges
from effasr.decoding.continuous_batching.cuda_graph import Capture, Readback, StepGraph
from effasr.decoding.decoded import Decoded
from effasr.decoding.suppression import Suppression
from effasr.model.asr import ASRModel
from effasr.nn.cache.contiguous import GROUP
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr.nn.experts import EncoderOutput, expert_of
from effasr_kernels import PackedSequence

_AHEAD = 2
"""Steps that a GPU may have queued while the host reads the tokens of the one before them."""

_ADMITTED_SHARE = 1 / 8
"""Share of the slots that must be free before utterances are admitted: their keys are computed
together."""


@dataclass(slots=True)
class Utterance:
    """An utterance to decode.

    Attributes:
        name: Returned with the result; of any type.
        prompt: Prompt of at least one token.
        limit: Most tokens after the prompt, at least one.
    """

    name: Any
    prompt: Sequence[int]
    limit: int
    _said: list[int] = field(default_factory=list)
    _finished: bool = False
    _truncated: bool = False

    @property
    def room(self) -> int:
        """Most tokens that it reads."""
        return len(self.prompt) + self.limit

    def read(self, likeliest: int, eos_id: int) -> bool:
        """Add the best token of a step; returns whether the utterance ends with it.

        Steps that were queued before the end was known change nothing.
        """
        if self._finished:
            return False
        if likeliest == eos_id:
            self._finished = True
        else:
            self._said.append(likeliest)
            self._finished = self._truncated = len(self._said) == self.limit
        return self._finished

    def result(self) -> Decoded:
        """Return the transcript."""
        return Decoded(tuple(self._said), self._truncated)


@dataclass(frozen=True, slots=True)
class _Waiting:
    utterance: Utterance
    speech: Tensor
    expert: Tensor | None
    """int64 (1,), where names choose the decoder's experts."""


class Engine:
    """Decodes utterances in a fixed number of slots, with continuous batching.

    Each slot holds one utterance at its own position. A finished utterance leaves, and a waiting
    one takes its slot. One forward reads the prompts of all that are admitted together, except for
    the last token of each, which the next step reads. So steps are full as long as utterances wait,
    and have the same shapes whatever the slots hold: an utterance's tokens do not depend on the
    others. On a GPU the caches are paged, a step is one CUDA graph, and tokens are read some steps
    later; tokens of an utterance past its end are dropped. On a CPU the remaining slots are
    compacted at the end.

    The precision is that of autocast where the engine is created.
    """

    def __init__(
        self,
        model: ASRModel,
        eos_id: int,
        classes: int | None = None,
        *,
        slots: int,
        max_frames: int,
        frame_budget: int | None = None,
        pages: tuple[int, int] | None = None,
        paged: bool | None = None,
        graph: bool = True,
        capture: Capture | None = None,
        ahead: int | None = None,
        within: Callable[[str], AbstractContextManager] = ranges.range,
    ) -> None:
        """Allocate the caches, and capture the step.

        Args:
            model: Model with a decoder, in evaluation mode.
            eos_id: The end token.
            classes: Number of the model's classes that are tokens; all by default.
            slots: Utterances at a time.
            max_frames: Most encoder frames of one utterance.
            frame_budget: Most encoder frames of all at a time, unless one alone has more; unlimited
                by default.
            pages: Pages for all tokens and for all frames at a time; by default as many as could be
                needed.
            paged: Whether the caches are paged; by default on a GPU.
            graph: Whether a GPU captures the step, which does not pay for a few utterances.
            capture: Captures a step, as in `StepGraph`; for tests without a GPU.
            ahead: Steps that may be queued before tokens are read; by default 2 with pages, else 0.
            within: Makes the contexts of ``decode.admit`` and ``decode.step``, for profiling.

        Raises:
            ValueError: There is no slot.
        """
        if slots < 1:
            raise ValueError(f"`slots` must be at least 1, but is {slots}: nothing could enter.")
        assert model.decoder is not None
        self._within = within
        self._model, self._eos_id, self._classes = model, eos_id, classes
        self._decoder = model.decoder
        weight = self._decoder.output_weight
        self._device = weight.device
        self._dtype = None
        if torch.is_autocast_enabled(self._device.type):
            self._dtype = torch.get_autocast_dtype(self._device.type)
            self._decoder = model.decoder.cast(self._dtype)
        self.slots, self.max_frames = slots, max_frames
        self._budget = slots * max_frames if frame_budget is None else frame_budget
        self._max_tokens = self._decoder.config.max_positions
        capacity = -(-slots // GROUP) * GROUP
        self._waiting: deque[_Waiting] = deque()
        with self._computing():
            self._state = self._decoder.new_state(
                capacity, self._max_tokens, max_frames, paged=paged, pages=pages
            )
            self._tokens = torch.zeros(capacity, dtype=torch.int64, device=self._device)
            self._suppression = Suppression.of(self._decoder, classes)
            # Rows whose next token is the first of a transcript.
            self._begins = torch.zeros(capacity, dtype=torch.bool, device=self._device)
            self._seats: list[Utterance | None] = [None] * capacity
            if not self._state.paged:
                self._resize(0)
            if ahead is None:
                ahead = _AHEAD if self._state.paged else 0
            self._readback = Readback(capacity, ahead, self._device)
            self._run = self._step
            if graph and (capture is not None or self._device.type == "cuda"):
                # All slots are idle: the steps before the capture change nothing that is used
                # later.
                self._run = StepGraph(self._step, capture)

    @property
    def unfinished(self) -> list[Any]:
        """The names of all utterances without a result."""
        seated = [seat.name for seat in self._seats if seat is not None]
        return [*seated, *(one.utterance.name for one in self._waiting)]

    def submit(self, encoded: PackedSequence, utterances: Sequence[Utterance]) -> None:
        """Queue utterances, the longest first, so that few slots are empty at the end.

        Args:
            encoded: (T, C), from ``model.encode``; sequences past the utterances are not decoded.
            utterances: One for each sequence.

        Raises:
            ValueError: One does not fit into a slot.
        """
        with self._computing():
            speech = self._model.projected(encoded).values
        lengths, starts = encoded.layout.lengths, encoded.layout.cu_seqlens_host
        expert = expert_of(encoded)
        for one, frames in zip(utterances, lengths, strict=False):
            if not one.prompt or one.room > self._max_tokens:
                raise ValueError(
                    f"`utterances` must have 1 to {self._max_tokens} tokens, prompt and limit "
                    f"together, but one has {one.room} with a prompt of {len(one.prompt)}."
                )
            if frames > self.max_frames or not self._state.fits([one.room], [frames], empty=True):
                raise ValueError(
                    f"`encoded` must have sequences of at most {self.max_frames} frames that fit "
                    f"into the pages, but one has {frames}, and reads {one.room} tokens."
                )
        waiting = [
            _Waiting(
                one,
                speech[starts[number] : starts[number] + lengths[number]],
                None if expert is None else expert[number : number + 1],
            )
            for number, one in enumerate(utterances)
        ]
        self._waiting.extend(sorted(waiting, key=lambda one: -len(one.speech)))

    def results(self, *, drain: bool = True) -> Iterator[tuple[Any, Decoded]]:
        """Decode; yields names and results as utterances finish.

        Args:
            drain: Whether to continue until all are finished, or only until all have a slot, so
                that more can be submitted before slots are empty.
        """
        while drain or self._waiting:
            finished: list[Utterance] = []
            with self._computing():
                self._seat()
                busy = any(seat is not None for seat in self._seats)
                if not busy and not len(self._readback):
                    return
                if busy:
                    with self._within("decode.step"):
                        self._readback.put(self._run(), list(self._seats))
                if self._readback.due or not busy:
                    finished = self._read()
            yield from ((one.name, one.result()) for one in finished)

    def _step(self) -> Tensor:
        """Read a token of each row; returns the best next tokens, int64 (rows,)."""
        tokens = self._tokens[: self._state.num_rows]
        hidden = self._decoder.step(tokens, self._state)
        if self._suppression is None:
            likeliest = self._decoder.likeliest(hidden, self._classes)
        else:
            begins = self._begins[: len(hidden)]
            likeliest = self._suppression.likeliest(self._decoder, hidden, begins, self._classes)
            begins.zero_()
        tokens.copy_(likeliest)
        return likeliest

    def _read(self) -> list[Utterance]:
        """Read the tokens of a step; finished utterances leave their slots."""
        tokens, seats = self._readback.get()
        finished = [
            (row, one)
            for row, (one, token) in enumerate(zip(seats, tokens, strict=True))
            if one is not None and one.read(token, self._eos_id)
        ]
        for row, _ in finished:
            self._seats[row] = None
        if finished:
            self._state.release([row for row, _ in finished])
        return [one for _, one in finished]

    def _seat(self) -> None:
        """Admit waiting utterances if enough can enter; without any, drop idle slots."""
        taken = sum(seat is not None for seat in self._seats)
        if not self._waiting:
            if not self._state.paged and taken <= KEPT_SHARE * len(self._seats):
                self._resize(taken)
            return
        entering = self._next(self.slots - taken, alone=not taken)
        left = len(self._waiting) - len(entering)
        if taken and left and len(entering) < _ADMITTED_SHARE * (taken + len(entering)):
            return
        if not self._state.paged and taken + len(entering) > len(self._seats):
            self._resize(taken + len(entering))
        for _ in entering:
            self._waiting.popleft()
        if entering:
            free = (row for row, seat in enumerate(self._seats) if seat is None)
            self._admit([next(free) for _ in entering], entering)

    def _next(self, slots: int, *, alone: bool) -> list[_Waiting]:
        """Return the utterances that have waited longest and fit together into the free slots."""
        chosen: list[_Waiting] = []
        rooms: list[int] = []
        frames: list[int] = []
        free = self._budget - self._state.frames
        for one in islice(self._waiting, slots):
            rooms, frames = [*rooms, one.utterance.room], [*frames, len(one.speech)]
            within = sum(frames) <= free or (alone and not chosen)
            if not within or not self._state.fits(rooms, frames):
                break
            chosen.append(one)
        return chosen

    def _admit(self, rows: Sequence[int], chosen: Sequence[_Waiting]) -> None:
        """Move utterances into free slots, without waiting for the device."""
        sizes, utterances = self._state.sizes, [one.utterance for one in chosen]
        layout = sizes.layout([len(one.speech) for one in chosen])
        tail = chosen[0].speech.new_zeros(layout.rows - layout.total, chosen[0].speech.shape[1])
        speech = torch.cat([*(one.speech for one in chosen), tail])
        named = [one.expert for one in chosen if one.expert is not None]
        expert = torch.cat(named) if named else None
        with self._within("decode.admit"):
            self._decoder.admit(
                self._state,
                rows,
                EncoderOutput(speech, layout, expert),
                [one.prompt[:-1] for one in utterances],
                [one.room for one in utterances],
            )
        last = sizes.integers([one.prompt[-1] for one in utterances])
        places = sizes.integers(rows)
        self._tokens.index_copy_(0, places, last)
        self._begins.index_fill_(0, places, True)
        for row, one in zip(rows, utterances, strict=True):
            self._seats[row] = one

    def _resize(self, taken: int) -> None:
        """Use whole groups of rows for this many utterances, the present ones first."""
        rows = max(GROUP, -(-taken // GROUP) * GROUP)
        if rows > len(self._seats):
            self._seats += [None] * (rows - len(self._seats))
            self._state.extend(rows)
        elif rows < len(self._seats):
            behind = (row for row in range(rows, len(self._seats)) if self._seats[row] is not None)
            order = [
                row if self._seats[row] is not None else next(behind, row) for row in range(rows)
            ]
            self._state.keep(order)
            self._tokens[:rows] = self._tokens[order]
            self._seats = [self._seats[row] for row in order]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        kind, half = self._device.type, self._dtype is not None
        # The weights already have the right precision, so autocast need not cache copies.
        autocast = torch.autocast(kind, self._dtype, enabled=half, cache_enabled=False)
        with torch.no_grad(), autocast:
            yield
