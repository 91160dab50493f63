"""Greedy search of the attention decoder with continuous batching."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from effasr import ranges
from effasr.decoding.decoded import Decoded
from effasr.decoding.slots import SlotEngine
from effasr.decoding.suppression import Suppression
from effasr.model.asr import ASRModel
from effasr.nn.cache.contiguous import GROUP
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr.nn.experts import EncoderOutput, expert_of
from effasr_kernels import PackedSequence

Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], Any], Tensor]]

_WARM_UPS = 3  # runs before capture, in which libraries choose algorithms and allocate workspaces
_AHEAD = 2  # steps that a GPU may have queued while the host reads the tokens of an earlier one


@dataclass(slots=True, eq=False)
class Utterance:
    name: Any  # returned with the result
    prompt: Sequence[int]  # at least one token
    limit: int  # most tokens after the prompt, at least one
    _speech: Tensor | None = None  # encoder output; None once it is in the cache
    _expert: Tensor | None = None  # int64 (1,), where names choose the decoder's experts
    _tokens: list[int] = field(default_factory=list)
    _finished: bool = False
    _truncated: bool = False

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt) + self.limit

    @property
    def frames(self) -> int:
        assert self._speech is not None
        return len(self._speech)

    def read(self, likeliest: int, eos_id: int) -> bool:
        """Add the best token; return whether it ends the utterance. Later steps change nothing."""
        if self._finished:
            return False
        if likeliest == eos_id:
            self._finished = True
        else:
            self._tokens.append(likeliest)
            self._finished = self._truncated = len(self._tokens) == self.limit
        return self._finished

    def result(self) -> Decoded:
        return Decoded(tuple(self._tokens), self._truncated)


def attention_greedy(
    model: ASRModel,
    encoded: PackedSequence,  # (T, C); sequences past ``len(prompts)`` are not decoded
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],  # most tokens of each transcript after its prompt
    eos_id: int,
    classes: int | None = None,  # number of the model's classes that are tokens; all by default
    *,
    slots: int | None = None,  # sequences decoded at a time; all by default
) -> list[Decoded]:
    """Decode sequences of encoder output by the attention decoder and its caches."""
    utterances = [
        Utterance(index, prompt, limit)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    if not utterances:
        return []
    slots, max_frames = len(utterances) if slots is None else slots, encoded.layout.max_seqlen_bound
    engine = Engine(model, eos_id, classes, slots=slots, max_frames=max_frames, graph=False)
    engine.submit(encoded, utterances)
    results = dict(engine.results())
    return [results[index] for index in range(len(utterances))]


class Engine(SlotEngine[Utterance]):
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
        max_frames: int,  # of one utterance
        # Most encoder frames of all at a time, unless one alone has more; unlimited by default.
        frame_budget: int | None = None,
        # For all tokens and for all frames at a time; by default as many as could be needed.
        pages: tuple[int, int] | None = None,
        paged: bool | None = None,  # by default on a GPU
        graph: bool = True,  # whether a GPU captures the step: does not pay for a few utterances
        capture: Capture | None = None,  # as in `StepGraph`; for tests without a GPU
        ahead: int | None = None,  # steps queued before tokens are read; by default 2 with pages
        # Makes the contexts of ``decode.admit`` and ``decode.step``, for profiling.
        within: Callable[[str], AbstractContextManager] = ranges.range,
    ) -> None:
        super().__init__(slots)
        assert model.decoder is not None
        self._within = within
        self._model, self._eos_id, self._classes = model, eos_id, classes
        self._decoder = model.decoder
        self._device = self._decoder.output_weight.device
        self._dtype = None
        if torch.is_autocast_enabled(self._device.type):
            self._dtype = torch.get_autocast_dtype(self._device.type)
            self._decoder = model.decoder.cast(self._dtype)
        self.max_frames = max_frames
        self._budget = slots * max_frames if frame_budget is None else frame_budget
        self._max_tokens = self._decoder.config.max_positions
        capacity = -(-slots // GROUP) * GROUP
        with self._computing():
            self._state = self._decoder.new_state(
                capacity, self._max_tokens, max_frames, paged=paged, pages=pages
            )
            self._tokens = torch.zeros(capacity, dtype=torch.int64, device=self._device)
            self._suppression = Suppression.from_decoder(self._decoder, classes)
            # Rows whose next token is the first of a transcript.
            self._begins = torch.zeros(capacity, dtype=torch.bool, device=self._device)
            self._slots: list[Utterance | None] = [None] * capacity
            if not self._state.paged:
                self._resize(0)
            if ahead is None:
                ahead = _AHEAD if self._state.paged else 0
            self._readback = Readback(capacity, ahead, self._device)
            self._run = self._decode_token
            if graph and (capture is not None or self._device.type == "cuda"):
                # All slots are idle: the steps before the capture change nothing used later.
                self._run = StepGraph(self._decode_token, capture)

    def submit(self, encoded: PackedSequence, utterances: Sequence[Utterance]) -> None:
        """Queue utterances of encoder output (T, C), the longest first: few slots end up empty."""
        with self._computing():
            speech = self._model.projected(encoded).values
        lengths, starts = encoded.layout.lengths, encoded.layout.cu_seqlens_host
        experts = expert_of(encoded)
        for index, (utterance, frames) in enumerate(zip(utterances, lengths, strict=False)):
            total = utterance.max_total_tokens
            if not utterance.prompt or total > self._max_tokens:
                raise ValueError(
                    f"`utterances` must have 1 to {self._max_tokens} tokens, prompt and limit "
                    f"together, but one has {total} with a prompt of {len(utterance.prompt)}."
                )
            if frames > self.max_frames or not self._state.fits([total], [frames], empty=True):
                raise ValueError(
                    f"`encoded` must have sequences of at most {self.max_frames} frames that fit "
                    f"into the pages, but one has {frames}, and reads {total} tokens."
                )
            utterance._speech = speech[starts[index] : starts[index] + frames]
            utterance._expert = None if experts is None else experts[index : index + 1]
        self._enqueue(sorted(utterances, key=lambda utterance: -utterance.frames))

    def _step(self) -> list[Utterance]:
        with self._computing():
            self._fill_slots()
            busy = any(self._slots)
            if busy:
                with self._within("decode.step"):
                    self._readback.put(self._run(), list(self._slots))
            return self._read() if self._readback.due or not busy else []

    def _decode_token(self) -> Tensor:
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
        tokens, slots = self._readback.get()
        finished = [
            (row, utterance)
            for row, (utterance, token) in enumerate(zip(slots, tokens, strict=True))
            if utterance is not None and utterance.read(token, self._eos_id)
        ]
        for row, _ in finished:
            self._slots[row] = None
        if finished:
            self._state.release([row for row, _ in finished])
        return [utterance for _, utterance in finished]

    def _fill_slots(self) -> None:
        """Admit waiting utterances if enough can enter; without any, drop idle slots."""
        running = sum(slot is not None for slot in self._slots)
        if not self._waiting:
            if not self._state.paged and running <= KEPT_SHARE * len(self._slots):
                self._resize(running)
            return
        entering = self._take_admissible(running)
        if not self._state.paged and running + len(entering) > len(self._slots):
            self._resize(running + len(entering))
        if entering:
            free = (row for row, slot in enumerate(self._slots) if slot is None)
            self._admit([next(free) for _ in entering], entering)

    def _fitting(self, waiting: Sequence[Utterance], running: int) -> list[Utterance]:
        chosen: list[Utterance] = []
        tokens: list[int] = []
        frames: list[int] = []
        free = self._budget - self._state.frames
        for utterance in waiting:
            tokens, frames = [*tokens, utterance.max_total_tokens], [*frames, utterance.frames]
            within = sum(frames) <= free or not (running or chosen)
            if not within or not self._state.fits(tokens, frames):
                break
            chosen.append(utterance)
        return chosen

    def _admit(self, rows: Sequence[int], entering: Sequence[Utterance]) -> None:
        """Move utterances into free slots, without waiting for the device."""
        sizes = self._state.sizes
        parts = [utterance._speech for utterance in entering if utterance._speech is not None]
        layout = sizes.layout(list(map(len, parts)))
        tail = parts[0].new_zeros(layout.rows - layout.total, parts[0].shape[1])
        experts = [utterance._expert for utterance in entering if utterance._expert is not None]
        expert = torch.cat(experts) if experts else None
        with self._within("decode.admit"):
            self._decoder.admit(
                self._state,
                rows,
                EncoderOutput(torch.cat([*parts, tail]), layout, expert),
                [utterance.prompt[:-1] for utterance in entering],
                [utterance.max_total_tokens for utterance in entering],
            )
        index = sizes.integers(rows)
        last = sizes.integers([utterance.prompt[-1] for utterance in entering])
        self._tokens.index_copy_(0, index, last)
        self._begins.index_fill_(0, index, True)
        for row, utterance in zip(rows, entering, strict=True):
            self._slots[row] = utterance
            utterance._speech = utterance._expert = None

    def _resize(self, running: int) -> None:
        """Use whole groups of rows for this many utterances, the present ones first."""
        rows = max(GROUP, -(-running // GROUP) * GROUP)
        slots = self._slots
        if rows > len(slots):
            slots += [None] * (rows - len(slots))
            self._state.extend(rows)
        elif rows < len(slots):
            behind = (row for row in range(rows, len(slots)) if slots[row] is not None)
            order = [row if slots[row] is not None else next(behind, row) for row in range(rows)]
            self._state.keep(order)
            self._tokens[:rows] = self._tokens[order]
            self._slots = [slots[row] for row in order]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        kind, half = self._device.type, self._dtype is not None
        # The weights already have the right precision, so autocast need not cache copies.
        autocast = torch.autocast(kind, self._dtype, enabled=half, cache_enabled=False)
        with torch.no_grad(), autocast:
            yield


class StepGraph:
    """Replays a captured function without arguments.

    The function reads and writes tensors at fixed addresses, and may not synchronize with the
    device. It runs a few times before capture, so the state at that time must make it harmless.
    """

    def __init__(self, step: Step, capture: Capture | None = None) -> None:
        capture = _capture if capture is None else capture
        self._replay, self._output = capture(step)

    def __call__(self) -> Tensor:
        """Run the step; the next call overwrites the result."""
        self._replay()
        return self._output


def _capture(step: Step) -> tuple[Callable[[], Any], Tensor]:
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            step()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # Other threads pin memory for later batches meanwhile, which would invalidate a capture that
    # covers all threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = step()
    return graph.replay, output


class Readback:
    """Copies the results of steps to the host in order, some steps later.

    On a GPU the host waits only when it is ``ahead`` steps ahead of the device, because each result
    is copied to pinned memory behind its step. On a CPU there is nothing to wait for.
    """

    def __init__(self, rows: int, ahead: int, device: torch.device) -> None:
        self._ahead = ahead
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None, Any]] = deque()
        self._pinned: deque[Tensor] | None = None
        if device.type == "cuda":
            pinned = torch.empty(ahead + 1, rows, dtype=torch.int64, pin_memory=True)
            self._pinned = deque(pinned)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def due(self) -> bool:
        """Whether the queue is full, so that the first result must be read."""
        return len(self._queue) > self._ahead

    def put(self, result: Tensor, about: Any) -> None:
        """Start to copy a result, int64 (rows,), with the data that belongs to it."""
        if self._pinned is None:
            self._queue.append((result.clone(), None, about))
            return
        buffer, event = self._pinned.popleft(), torch.cuda.Event()
        buffer.copy_(result, non_blocking=True)
        event.record()
        self._queue.append((buffer, event, about))

    def get(self) -> tuple[list[int], Any]:
        """Wait for the oldest unread result."""
        buffer, event, about = self._queue.popleft()
        if event is not None and self._pinned is not None:
            event.synchronize()
            self._pinned.append(buffer)
        return buffer.tolist(), about
