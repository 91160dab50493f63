"""Greedy and beam search of answers with continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from effasr.data.conversation.batch import ConversationBatch
from effasr.decoding.decoded import Decoded
from effasr.decoding.language_model.cache import CachedConversations
from effasr.model.asr import ASRModel
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr.nn.cache.paged import most_pages
from effasr_kernels import PackedLayout, PackedSequence

_ADMITTED_SHARE = 1 / 8
"""Share of the slots that must be free before conversations are admitted, which are read
together."""

_ROWS_READ = 8192
"""Most rows that are read together, unless one conversation alone has more."""

_FREE_SHARE = 1 / 2
"""Share of the free memory of a GPU for pages. When the pool grows, the old one is copied, so three
quarters are taken for a moment."""


@dataclass(slots=True, eq=False)
class _Answer:
    """The answer to a conversation.

    Attributes:
        name: Returned with the result.
        limit: Most tokens of the answer.
        longest: Most rows of the conversation with its answer; the last token is not read.
        pages: Most pages that all hypotheses take together.
        x: Input rows of the conversation, (n, width); None once they are in the cache.
        rows: Row of the cache of each hypothesis.
        going: Score and tokens of the hypotheses that go on.
        done: Rank and tokens of the best that has ended; None before one has.
    """

    name: Any
    limit: int
    longest: int
    pages: int
    x: Tensor | None
    rows: list[int] = field(default_factory=list)
    going: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    done: tuple[float, tuple[int, ...]] | None = None

    def result(self) -> Decoded:
        if self.done is not None:
            return Decoded(self.done[1])
        return Decoded(self.going[0][1], True)


class ConversationEngine:
    """Answers conversations; one that ends leaves its slot to the next that waits.

    An answer does not depend on the other conversations, up to rounding. With a beam, the
    hypotheses of a conversation take one slot together.
    """

    def __init__(
        self,
        model: ASRModel,
        stop_ids: Collection[int],
        *,
        slots: int,
        classes: int | None = None,
        beam: int = 1,
        length_penalty: float = 0.0,
        paged: bool | None = None,
        pages: int | None = None,
    ) -> None:
        """Begin without conversations.

        Args:
            model: Model with a language model, in evaluation mode.
            stop_ids: Tokens that end an answer.
            slots: Conversations at a time.
            classes: Number of the model's classes that are tokens; all by default.
            beam: K, hypotheses of each conversation; 1 for greedy search.
            length_penalty: With a beam, the exponent a by which an answer of score s and n tokens,
                its end included, ranks: ``s / ((5 + n) / 6) ** a``. An answer that ends goes before
                all that reach their limit.
            paged: Whether the cache is paged; by default on a GPU.
            pages: Most pages of 32 rows that conversations take together, their answers included,
                unless one alone needs more; others wait until enough are free. By default those
                that fit into half of the free memory of a GPU; elsewhere without limit.

        Raises:
            ValueError: The model has no language model, or there is no slot, page or hypothesis.
        """
        if model.language_model is None:
            raise ValueError("`model` must have a language model, but has none.")
        for name, value in (("slots", slots), ("beam", beam), ("pages", pages)):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}.")
        self._model, self._language_model = model, model.language_model
        self._stops, self._classes = frozenset(stop_ids), classes
        self.slots, self._beam, self._length_penalty = slots, beam, length_penalty
        self._paged, self._pages = paged, pages
        self._waiting: deque[_Answer] = deque()
        self._active: list[_Answer] = []
        # Those without a result, in order.
        self._unfinished: dict[_Answer, None] = {}
        # Rows of the cache without a hypothesis.
        self._idle: list[int] = []
        self._cache: CachedConversations | None = None

    @property
    def unfinished(self) -> list[Any]:
        """The names of all conversations without a result."""
        return [one.name for one in self._unfinished]

    @torch.no_grad()
    def submit(
        self, batch: ConversationBatch, limits: Sequence[int], names: Sequence[Any] | None = None
    ) -> None:
        """Encode the speech of conversations, and queue them.

        Args:
            batch: Conversations whose last row is the last that is given, on the model's device.
            limits: Most tokens of each answer, without its end; at least 1.
            names: Returned with the results; ``batch.ids`` by default.

        Raises:
            ValueError: There is not one limit for each conversation, or one is less than 1.
        """
        count = len(batch.ids)
        if len(limits) != count or min(limits, default=1) < 1:
            raise ValueError(
                f"`limits` must be {count} numbers of at least 1, but are {list(limits)}."
            )
        if not count:
            return
        encoded = self._model.encode(batch).values if sum(batch.clip_counts) else None
        x = self._language_model.embed(batch, encoded)
        if self._cache is None:
            self._cache = self._new_cache(x)
        pieces = x.split([*batch.token_lengths, len(x) - sum(batch.token_lengths)])
        names = batch.ids if names is None else names
        for name, limit, rows in zip(names, limits, pieces, strict=False):
            pages = most_pages(len(rows), limit - 1, self._beam)
            one = _Answer(name, limit, len(rows) + limit - 1, pages, rows)
            self._waiting.append(one)
            self._unfinished[one] = None

    def results(self, *, drain: bool = True) -> Iterator[tuple[Any, Decoded]]:
        """Decode; yields names and results as answers end.

        Args:
            drain: Whether to continue until all have ended, or only until all have a slot, so that
                more can be submitted before slots are empty.
        """
        while self._waiting or (drain and self._active):
            for one in self._step():
                del self._unfinished[one]
                yield one.name, one.result()

    @torch.no_grad()
    def _step(self) -> list[_Answer]:
        """Admit what waits, and continue every answer by a token; return those that have ended."""
        cache = self._admit()
        log_probs = cache.logits()[:, : self._classes]
        before = self._active
        if self._beam == 1:
            self._continue_greedy(cache, log_probs.argmax(1).tolist())
        else:
            self._continue_beam(cache, log_probs.log_softmax(1))
        going = set(map(id, self._active))
        return [one for one in before if id(one) not in going]

    def _admit(self) -> CachedConversations:
        """Read the conversations that have waited longest, if enough slots are free."""
        cache = self._cache
        assert cache is not None
        entering: list[_Answer] = []
        free, rows = self.slots - len(self._active), 0
        taken = sum(one.pages for one in self._active)
        if free >= _ADMITTED_SHARE * self.slots or not self._active:
            for one in islice(self._waiting, free):
                assert one.x is not None
                rows, taken = rows + len(one.x), taken + one.pages
                if rows > _ROWS_READ and entering:
                    break
                if self._pages is not None and taken > self._pages and (entering or self._active):
                    break
                entering.append(one)
        if entering:
            missing = len(entering) - len(self._idle)
            if missing > 0:
                self._idle += cache.extend(missing)
            new, self._idle = self._idle[: len(entering)], self._idle[len(entering) :]
            inputs = [one.x for one in entering if one.x is not None]
            layout = PackedLayout.from_lengths([len(x) for x in inputs], inputs[0].device)
            pages = sum(one.pages for one in (*self._active, *entering))
            cache.reserve(pages, max(one.longest for one in entering), self._pages)
            cache.admit(new, PackedSequence(torch.cat(inputs), layout))
            for one, row in zip(entering, new, strict=True):
                one.x, one.rows = None, [row]
                self._waiting.popleft()
            self._active = [*self._active, *entering]
        return cache

    def _new_cache(self, x: Tensor) -> CachedConversations:
        """Return a cache with one row for the data type of input rows, and limit its pages."""
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self._idle = [0]
        cache = CachedConversations(self._language_model, 1, dtype, paged=self._paged)
        if self._pages is None and kind == "cuda" and cache.page_bytes:
            free = torch.cuda.mem_get_info(x.device)[0]
            # What PyTorch keeps for later tensors.
            free += torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
            self._pages = max(1, int(_FREE_SHARE * free) // cache.page_bytes)
        return cache

    def _continue_greedy(self, cache: CachedConversations, best: list[int]) -> None:
        still, ended, read = [], [], [0] * len(best)
        for one in self._active:
            (row,), ((_, text),) = one.rows, one.going
            token = best[row]
            if token in self._stops:
                one.done = 0.0, text
            else:
                one.going = [(0.0, (*text, token))]
            if one.done is None and len(text) + 1 < one.limit:
                still.append(one)
                read[row] = token
            else:
                ended.append(row)
        self._active = still
        cache.release(ended)
        self._idle += ended
        if not still:
            return
        if not self._waiting and len(still) <= KEPT_SHARE * len(best):
            # Nothing waits for the idle rows, so they go.
            kept = [one.rows[0] for one in still]
            cache.select(kept)
            read, self._idle = [read[row] for row in kept], []
            for place, one in enumerate(still):
                one.rows = [place]
        cache.read(read)

    def _continue_beam(self, cache: CachedConversations, log_probs: Tensor) -> None:
        # As many of the best tokens may be stops.
        count = min(self._beam + len(self._stops), log_probs.shape[1])
        values, tokens = (x.tolist() for x in log_probs.topk(count, dim=1))
        rows: list[int] = []
        read: list[int] = []
        still: list[_Answer] = []
        for one in self._active:
            found = [
                (score + value, token, text, row)
                for row, (score, text) in zip(one.rows, one.going, strict=True)
                for value, token in zip(values[row], tokens[row], strict=True)
            ]
            found.sort(key=lambda item: (-item[0], item[1], item[3]))
            one.going, parents = [], []
            for score, token, text, parent in found:
                if token in self._stops:
                    ranked = self._rank(score, len(text) + 1)
                    if one.done is None or ranked > one.done[0]:
                        one.done = ranked, text
                elif len(one.going) < self._beam:
                    one.going.append((score, (*text, token)))
                    parents.append(parent)
            if self._may_improve(one):
                one.rows = list(range(len(rows), len(rows) + len(parents)))
                rows += parents
                read += [text[-1] for _, text in one.going]
                still.append(one)
        self._active = still
        if still:
            cache.select(rows)
            cache.read(read)
            self._idle = []
        else:
            self._idle = list(range(len(cache.lengths)))
            cache.release(self._idle)

    def _rank(self, score: float, length: int) -> float:
        return score / ((5 + length) / 6) ** self._length_penalty

    def _may_improve(self, one: _Answer) -> bool:
        """Return whether a hypothesis that goes on may end with a better rank than the best."""
        if not one.going:
            return False
        score, text = one.going[0]
        if len(text) >= one.limit:
            return False
        # Scores only fall, and a longer answer is divided by more.
        return one.done is None or self._rank(score, one.limit) > one.done[0]
