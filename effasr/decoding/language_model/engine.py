"""Greedy and beam search of answers with continuous batching."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from effasr.checks import check
from effasr.data.conversation.batch import ConversationBatch
from effasr.decoding.decoded import Decoded
from effasr.decoding.slots import SlotEngine
from effasr.model.asr import ASRModel
from effasr.model.cost import language_model_sizes
from effasr.model.language_model.architecture import max_rows
from effasr.model.language_model.encoder_decoder import EncoderDecoder
from effasr.model.language_model.model import LanguageModel
from effasr.model.language_model.packed_attention import AttentionContext, PackedContext
from effasr.nn.cache.contiguous import CacheSizes, ContiguousCache
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr.nn.cache.paged import SharedPageCache, most_pages
from effasr_kernels import PackedLayout, PackedSequence

# Answers of an encoder-decoder model: what its decoder reads, and its cache of transformers.


class EncodedConversations:
    """Conversations that an encoder has read; see `CachedConversations`.

    The rows of a batch of transformers' decoders have one position, so all enter together.
    """

    page_bytes = 0

    def __init__(self, model: EncoderDecoder, rows: int) -> None:
        self._model, self._count = model, rows
        # Its name since transformers 5.24, which warns of the other one.
        is_new_name = "cache" in signature(model.model.decoder.forward).parameters
        self._argument = "cache" if is_new_name else "past_key_values"
        self._hidden = self._memory = self._is_row = torch.zeros(0)
        self._cache: Any = None

    @property
    def lengths(self) -> Sequence[int]:
        return range(self._count)

    def reserve(self, *limits: int | None) -> None:
        """Make no room: the cache grows."""

    def release(self, rows: Sequence[int]) -> None:
        """Leave rows in the batch, where nothing reads them."""

    def admit(self, rows: Sequence[int], x: PackedSequence) -> None:
        """Begin with these conversations, each the encoder's output and the first decoder row."""
        from transformers import DynamicCache, EncoderDecoderCache

        inputs = x.values.split(x.layout.lengths)
        empty = x.values[:0]
        by_row = dict(zip(rows, inputs, strict=True))
        sources = [by_row[row][:-1] if row in by_row else empty for row in range(self._count)]
        first = [by_row[row][-1] if row in by_row else x.values[0] for row in range(self._count)]
        self._memory = pad_sequence(sources, batch_first=True)
        lengths = torch.tensor([len(source) for source in sources], device=x.values.device)
        positions = torch.arange(self._memory.shape[1], device=x.values.device)
        self._is_row = positions < lengths[:, None]
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._run(torch.stack(first))

    def logits(self) -> Tensor:
        return self._model.logits(self._hidden).float()

    def read(self, tokens: Sequence[int]) -> None:
        ids = torch.tensor(tokens, device=self._memory.device)
        self._run(self._model.embed_tokens(ids))

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._memory.device)
        self._count = len(rows)
        self._cache.batch_select_indices(index)
        self._memory, self._is_row = self._memory[index], self._is_row[index]
        self._hidden = self._hidden[index]

    def extend(self, rows: int) -> list[int]:
        self._count += rows
        return list(range(self._count - rows, self._count))

    def _run(self, x: Tensor) -> None:
        options = {self._argument: self._cache, "use_cache": True}
        hidden = self._model.write(x[:, None], self._memory, self._is_row, **options)
        self._hidden = hidden[:, 0]


# Language model that reads conversations whole, and then row by row from a cache.


@dataclass(frozen=True, slots=True)
class _ContiguousContext:
    """Each new row attends to itself and to the cached rows of its conversation."""

    cache: ContiguousCache
    longest: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        sizes, group = self.cache.sizes, q.shape[1] // k.shape[1]
        new = torch.stack([k, v], 1).to(sizes.dtype)
        if scale is not None:
            # The cache multiplies scores by its own factor.
            q = q * (scale * sizes.head_dim**0.5)
        # To the cache, heads that share keys are several queries of a row.
        queries = q.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1).to(sizes.dtype)
        y = self.cache.attend(layer, queries, new)
        return y.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2).to(v.dtype)


@dataclass(frozen=True, slots=True)
class _PagedContext:
    """Each new row attends to itself and to the rows of its conversation in pages."""

    cache: SharedPageCache
    longest: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return self.cache.attend(layer, q, k, v, scale).to(v.dtype)


class CachedConversations:
    """Conversations that a language model has read; rows are hypotheses, or idle, each alone."""

    def __init__(
        self, model: LanguageModel, rows: int, dtype: torch.dtype, *, paged: bool | None = None
    ) -> None:
        sizes, device = language_model_sizes(model.config), model.output_weight.device
        self._model = model
        shape = CacheSizes(sizes.layers, sizes.key_heads, sizes.head_dim, dtype, device)
        self._cache: ContiguousCache | SharedPageCache
        if device.type != "cpu" if paged is None else paged:
            self._cache = SharedPageCache(shape, rows)
        else:
            self._cache = ContiguousCache(shape, rows, ahead=True)
        # Of idle rows 0.
        self._lengths = [0] * rows
        self._hidden = torch.zeros(rows, sizes.width, device=device)

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of the language model that each hypothesis has read; 0 for idle rows."""
        return self._lengths

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 if the cache has none."""
        if not isinstance(self._cache, SharedPageCache):
            return 0
        return self._cache.page_bytes

    def reserve(self, pages: int, longest: int, most: int | None = None) -> None:
        """Make room for conversations; a cache without pages makes it when they are read."""
        if isinstance(self._cache, SharedPageCache):
            self._cache.reserve(pages, longest, most)

    def admit(self, rows: Sequence[int], x: PackedSequence) -> None:
        """Read whole conversations (U, width) in place of what these rows held; there is room."""
        lengths = x.layout.lengths
        context = PackedContext(x.layout, observe=self._cache.loader(rows, lengths))
        hidden = self._model.run(x.values, x.layout.positions(), context)
        last = hidden[x.layout.cu_seqlens[1:].long() - 1]
        index = self._cache.sizes.integers(rows)
        self._hidden = self._hidden.to(last.dtype).index_copy(0, index, last)
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._lengths[row] = 0
        if isinstance(self._cache, SharedPageCache):
            self._cache.release(rows)

    def logits(self) -> Tensor:
        """Return the logits of the next token of each hypothesis: (N, V) float32."""
        return self._model.logits(self._hidden).float()

    def read(self, tokens: Sequence[int]) -> None:
        """Read one more token of each hypothesis; those of idle rows are not used."""
        integers = self._cache.sizes.integers
        positions = integers(self._lengths)
        self._lengths = [length and length + 1 for length in self._lengths]
        longest = max(self._lengths)
        context: AttentionContext
        if isinstance(self._cache, SharedPageCache):
            self._cache.look(self._lengths)
            context = _PagedContext(self._cache, longest)
        else:
            self._cache.look(self._lengths, grouped=False)
            context = _ContiguousContext(self._cache, longest)
        x = self._model.embed_tokens(integers(tokens))
        self._hidden = self._model.run(x, positions, context)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these hypotheses, which may repeat and take any order; at least one."""
        index = self._cache.sizes.integers(rows)
        if isinstance(self._cache, SharedPageCache):
            self._cache.select(rows)
        else:
            self._cache.reorder(index)
        self._hidden = self._hidden[index]
        self._lengths = [self._lengths[row] for row in rows]

    def extend(self, rows: int) -> list[int]:
        before = len(self._lengths)
        self.select([*range(before), *[0] * rows])
        added = list(range(before, before + rows))
        self.release(added)
        return added


_ROWS_READ = 8192  # most rows that are read together, unless one conversation alone has more

# Share of the free memory of a GPU for pages. When the pool grows, the old one is copied, so three
# quarters are taken for a moment.
_FREE_SHARE = 1 / 2


@dataclass(slots=True, eq=False)
class _Answer:
    name: Any  # returned with the result
    limit: int  # most tokens of the answer
    longest: int  # most rows of the conversation with its answer; the last token is not read
    pages: int  # most pages that all hypotheses take together
    x: Tensor | None  # input rows of the conversation, (n, width); None once they are in the cache
    rows: list[int] = field(default_factory=list)  # row of the cache of each hypothesis
    # Score and tokens of the open hypotheses.
    beam: list[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: [(0.0, ())])
    best: tuple[float, tuple[int, ...]] | None = None  # rank and tokens of the best that has ended

    def result(self) -> Decoded:
        if self.best is not None:
            return Decoded(self.best[1])
        return Decoded(self.beam[0][1], True)


class ConversationEngine(SlotEngine[_Answer]):
    """Answers conversations, several at a time.

    An answer does not depend on the other conversations, up to rounding. With a beam, the
    hypotheses of a conversation take one slot together. An answer of score s and n tokens, its end
    included, ranks by ``s / ((5 + n) / 6) ** length_penalty``; one that ends goes before all that
    reach their limit. An encoder-decoder model takes the next conversations when all have ended.
    """

    def __init__(
        self,
        model: ASRModel,
        stop_ids: Collection[int],  # tokens that end an answer
        *,
        slots: int,  # conversations at a time
        classes: int | None = None,  # number of the model's classes that are tokens
        beam: int = 1,
        length_penalty: float = 0.0,
        paged: bool | None = None,  # whether the cache is paged; by default on a GPU
        # Most pages of 32 rows that conversations take together, their answers included, unless one
        # alone needs more; others wait until enough are free. By default those that fit into half
        # of the free memory of a GPU; elsewhere without limit.
        pages: int | None = None,
    ) -> None:
        if model.language_model is None:
            raise ValueError("`model` must have a language model, but has none.")
        super().__init__(slots)
        check(beam >= 1, "beam", "be at least 1", beam)
        check(pages is None or pages >= 1, "pages", "be at least 1", pages)
        self._model, self._language_model = model, model.language_model
        self._stops, self._classes = frozenset(stop_ids), classes
        self._beam, self._length_penalty = beam, length_penalty
        self._paged, self._pages = paged, pages
        self._active: list[_Answer] = []
        self._idle: list[int] = []  # rows of the cache without a hypothesis
        self._cache: CachedConversations | EncodedConversations | None = None

    @torch.no_grad()
    def submit(
        self, batch: ConversationBatch, limits: Sequence[int], names: Sequence[Any] | None = None
    ) -> None:
        """Encode the speech of conversations, and queue them.

        Answers continue the last row of each; ``limits`` are the most tokens of each answer,
        without its end; ``names`` are returned with the results, ``batch.ids`` by default.
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
        if isinstance(self._language_model, EncoderDecoder):
            x = self._language_model.read(x, batch)[:-1]
        if self._cache is None:
            self._cache = self._new_cache(x)
        inputs = x.split([*batch.token_lengths, len(x) - sum(batch.token_lengths)])
        names = batch.ids if names is None else names
        self._enqueue(
            _Answer(
                name,
                limit,
                len(rows) + limit - 1,
                most_pages(len(rows), limit - 1, self._beam),
                rows,
            )
            for name, limit, rows in zip(names, limits, inputs, strict=False)
        )

    @torch.no_grad()
    def _step(self) -> list[_Answer]:
        cache = self._cache
        assert cache is not None
        self._admit(cache)
        log_probs = cache.logits()[:, : self._classes]
        before = self._active
        if self._beam == 1:
            self._continue_greedy(cache, log_probs.argmax(1).tolist())
        else:
            self._continue_beam(cache, log_probs.log_softmax(1))
        active = set(map(id, self._active))
        return [answer for answer in before if id(answer) not in active]

    def _fitting(self, waiting: Sequence[_Answer], running: int) -> list[_Answer]:
        entering: list[_Answer] = []
        rows, pages = 0, sum(answer.pages for answer in self._active)
        for answer in waiting:
            assert answer.x is not None
            rows, pages = rows + len(answer.x), pages + answer.pages
            if rows > _ROWS_READ and entering:
                break
            if self._pages is not None and pages > self._pages and (entering or running):
                break
            entering.append(answer)
        return entering

    def _admit(self, cache: CachedConversations | EncodedConversations) -> None:
        if self._active and isinstance(cache, EncodedConversations):
            return
        entering = self._take_admissible(len(self._active))
        if not entering:
            return
        missing = len(entering) - len(self._idle)
        if missing > 0:
            self._idle += cache.extend(missing)
        new, self._idle = self._idle[: len(entering)], self._idle[len(entering) :]
        inputs = [answer.x for answer in entering if answer.x is not None]
        layout = PackedLayout.from_lengths([len(x) for x in inputs], inputs[0].device)
        pages = sum(answer.pages for answer in (*self._active, *entering))
        cache.reserve(pages, max(answer.longest for answer in entering), self._pages)
        cache.admit(new, PackedSequence(torch.cat(inputs), layout))
        for answer, row in zip(entering, new, strict=True):
            answer.x, answer.rows = None, [row]
        self._active = [*self._active, *entering]

    def _new_cache(self, x: Tensor) -> CachedConversations | EncodedConversations:
        """Return a cache with one row for the data type of input rows, and limit its pages."""
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        self._idle = [0]
        if isinstance(self._language_model, EncoderDecoder):
            return EncodedConversations(self._language_model, 1)
        cache = CachedConversations(self._language_model, 1, dtype, paged=self._paged)
        if self._pages is None and kind == "cuda" and cache.page_bytes:
            free = torch.cuda.mem_get_info(x.device)[0]
            # What PyTorch keeps for later tensors.
            free += torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
            self._pages = max(1, int(_FREE_SHARE * free) // cache.page_bytes)
        return cache

    def _continue_greedy(
        self, cache: CachedConversations | EncodedConversations, best: list[int]
    ) -> None:
        active, ended, read = [], [], [0] * len(best)
        for answer in self._active:
            (row,), ((_, text),) = answer.rows, answer.beam
            token = best[row]
            if token in self._stops:
                answer.best = 0.0, text
            else:
                answer.beam = [(0.0, (*text, token))]
            if answer.best is None and len(text) + 1 < answer.limit:
                active.append(answer)
                read[row] = token
            else:
                ended.append(row)
        self._active = active
        cache.release(ended)
        self._idle += ended
        if not active:
            return
        if not self._waiting and len(active) <= KEPT_SHARE * len(best):
            # Nothing waits for the idle rows, so they go.
            rows = [answer.rows[0] for answer in active]
            cache.select(rows)
            read, self._idle = [read[row] for row in rows], []
            for row, answer in enumerate(active):
                answer.rows = [row]
        cache.read(read)

    def _continue_beam(
        self, cache: CachedConversations | EncodedConversations, log_probs: Tensor
    ) -> None:
        # As many of the best tokens may be stops.
        count = min(self._beam + len(self._stops), log_probs.shape[1])
        values, tokens = (x.tolist() for x in log_probs.topk(count, dim=1))
        rows: list[int] = []
        read: list[int] = []
        active: list[_Answer] = []
        for answer in self._active:
            candidates = [
                (score + value, token, text, row)
                for row, (score, text) in zip(answer.rows, answer.beam, strict=True)
                for value, token in zip(values[row], tokens[row], strict=True)
            ]
            candidates.sort(key=lambda item: (-item[0], item[1], item[3]))
            answer.beam, parents = [], []
            for score, token, text, parent in candidates:
                if token in self._stops:
                    rank = self._rank(score, len(text) + 1)
                    if answer.best is None or rank > answer.best[0]:
                        answer.best = rank, text
                elif len(answer.beam) < self._beam:
                    answer.beam.append((score, (*text, token)))
                    parents.append(parent)
            if self._may_improve(answer):
                answer.rows = list(range(len(rows), len(rows) + len(parents)))
                rows += parents
                read += [text[-1] for _, text in answer.beam]
                active.append(answer)
        self._active = active
        if active:
            cache.select(rows)
            cache.read(read)
            self._idle = []
        else:
            self._idle = list(range(len(cache.lengths)))
            cache.release(self._idle)

    def _rank(self, score: float, length: int) -> float:
        return score / ((5 + length) / 6) ** self._length_penalty

    def _may_improve(self, answer: _Answer) -> bool:
        """Return whether an open hypothesis may end with a better rank than the best."""
        if not answer.beam:
            return False
        score, text = answer.beam[0]
        if len(text) >= answer.limit:
            return False
        # Scores only fall, and a longer answer is divided by more.
        return answer.best is None or self._rank(score, answer.limit) > answer.best[0]


def answer_limits(
    model: ASRModel, batch: ConversationBatch, limit: Callable[[int], int]
) -> list[int]:
    """Return the most tokens of each answer: ``limit`` of its encoder frames, and the free rows."""
    settings = model.config.language_model
    assert settings is not None
    assert settings.architecture is not None
    most = max_rows(settings.architecture)
    limits = []
    for name, frames, rows in zip(batch.ids, batch.frame_lengths, batch.token_lengths, strict=True):
        tokens = limit(frames)
        if most is not None:
            check(rows < most, name, f"have fewer rows than the language model's {most}", rows)
            tokens = min(tokens, most - rows)
        limits.append(tokens)
    return limits


def answers(
    model: ASRModel,
    batch: ConversationBatch,
    limits: Sequence[int],
    stop_ids: Collection[int],
    *,
    classes: int | None = None,
    beam: int = 1,
    length_penalty: float = 0.0,
) -> list[Decoded]:
    engine = ConversationEngine(
        model,
        stop_ids,
        slots=max(1, len(limits)),
        classes=classes,
        beam=beam,
        length_penalty=length_penalty,
    )
    engine.submit(batch, limits, range(len(limits)))
    results = dict(engine.results())
    return [results[index] for index in range(len(limits))]
