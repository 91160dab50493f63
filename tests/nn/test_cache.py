"""Caches of decoders: contiguous, in pages and shared, rows attend as they do alone."""

import random

import pytest
import torch

from effasr.nn.cache.contiguous import CacheSizes, ContiguousCache
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.cache.paged import PAGE, PagedCache, SharedPageCache, most_pages
from effasr_kernels import PackedLayout

LAYERS, HEADS, WIDTH = 2, 3, 8
SIZES = CacheSizes(LAYERS, HEADS, WIDTH, torch.float64, torch.device("cpu"))
KINDS = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


def _draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _speech(lengths, seed=0):
    """Keys and values of packed sequences, layer by layer."""
    for layer in range(LAYERS):
        both = _draw(2, sum(lengths), HEADS, WIDTH, seed=100 * seed + layer)
        yield ((both[0], both[1]),)


def _attention(q, k, v):
    """One query, (H, D), to keys and values (L, H, D)."""
    weights = (torch.einsum("hd,lhd->hl", q, k) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, v)


class _Tokens:
    """Keys and values that rows are given step by step, kept in lists."""

    def __init__(self, rows):
        self.rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self._seed = 1000

    def step(self, state):
        """Give each row a token, and compare what it then attends to."""
        count = state.num_rows
        self._seed += 1
        state.look()
        for layer in range(LAYERS):
            q = _draw(count, HEADS, WIDTH, seed=self._seed)
            new = _draw(count, 2, HEADS, WIDTH, seed=self._seed + 10_000 * (layer + 1))
            result = state.self_cache.attend(layer, q, new)
            for row in range(count):
                held = self.rows[row]
                if layer == 0:
                    held.append(torch.stack([new[row]]))
                else:
                    held[-1] = torch.cat([held[-1], new[row][None]])
                past = torch.stack([token[layer] for token in held])
                expected = _attention(q[row], past[:, 0], past[:, 1])
                if state.going[row]:  # What idle rows find is no matter.
                    torch.testing.assert_close(result[row], expected)
        state.advance()


def _check_speech(state, of_row, hypotheses=1):
    """Compare attention to the speech of each row, (k, v) of each layer, or None of an idle row."""
    for layer in range(LAYERS):
        q = _draw(state.num_rows, HEADS, WIDTH, seed=layer)
        result = state.cross_cache.attend(layer, q)
        for row, existing in enumerate(of_row):
            for n in range(row * hypotheses, (row + 1) * hypotheses if existing else 0):
                k, v = existing[layer]
                expected = _attention(q[n], k, v) if len(k) else torch.zeros(HEADS, WIDTH).double()
                torch.testing.assert_close(result[n], expected)


def _split(lengths, seed=0):
    """`_speech` by sequence: keys and values of each layer."""
    layers = [(k.split(lengths), v.split(lengths)) for ((k, v),) in _speech(lengths, seed)]
    return [[(k[n], v[n]) for k, v in layers] for n in range(len(lengths))]


def _read(lengths, rows, seed):
    """Keys and values of tokens that sequences have read, layer by layer, and as `_Tokens` does."""
    layers = [both for (both,) in _speech(lengths, seed)]
    held: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    pieces = [(k.split(lengths), v.split(lengths)) for k, v in layers]
    for row, length in enumerate(lengths):
        for position in range(length):
            both = [torch.stack([k[row][position], v[row][position]]) for k, v in pieces]
            held[row].append(torch.stack(both))
    return layers, held


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go_at_their_own_positions(seed, paged):
    """Sequences begin with what they have read; what idle rows write reaches nobody."""
    draw, most = random.Random(seed), PAGE + 30
    state = DecoderState(SIZES, 4, most, 90, paged=paged, pages=(8, 12) if paged else None)
    tokens, speech = _Tokens(4), {}
    for turn in range(24):
        idle = [row for row in range(4) if row not in speech]
        full = [row for row in speech if len(tokens.rows[row]) > most - 6]
        if full or (speech and draw.random() < 0.2):
            released = full or draw.sample(sorted(speech), 1)
            state.release(released)
            for row in released:
                tokens.rows[row] = speech.pop(row)[:0]
        elif idle and draw.random() < 0.5:
            rows = draw.sample(idle, draw.randint(1, len(idle)))
            frames = [draw.choice([0, 1, 33, 70]) for _ in rows]
            read = [draw.choice([0, 1, PAGE + 5]) for _ in rows]
            layers, held = _read(read, len(rows), seed=2 * turn + 1)
            both = [(*s, t) for s, t in zip(_speech(frames, 2 * turn), layers, strict=True)]
            parts = both if any(read) else _speech(frames, 2 * turn)
            state.admit(rows, frames, [most] * len(rows), parts, read)
            speech |= dict(zip(rows, _split(frames, 2 * turn), strict=True))
            for row, local in zip(rows, held, strict=True):
                tokens.rows[row] = local
        for _ in range(draw.randint(0, 5)):
            tokens.step(state)
            for row in range(4):
                tokens.rows[row] = tokens.rows[row] if row in speech else []
        assert state.positions.tolist() == [len(x) for x in tokens.rows]
        _check_speech(state, [speech.get(row) for row in range(4)])


@KINDS
def test_hypotheses_have_what_their_sequence_has_read_at_once(paged):
    """Also before any step has looked at it."""
    state = DecoderState(SIZES, 2, PAGE + 9, 20, paged=paged)
    layers, held = _read([PAGE + 2] * 2, 2, seed=2)
    both = [(*s, t) for s, t in zip(_speech([20, 4]), layers, strict=True)]
    state.admit_all(PackedLayout.from_lengths([20, 4]), both, PAGE + 2)
    assert state.length == PAGE + 2
    state.widen(3)
    tokens = _Tokens(6)
    tokens.rows = [list(held[row // 3]) for row in range(6)]
    for _ in range(7):
        tokens.step(state)
        parents = torch.tensor([1, 0, 0, 5, 4, 5])
        state.reorder(parents)
        tokens.rows = [list(tokens.rows[parent]) for parent in parents.tolist()]
    with pytest.raises(ValueError, match=rf"at most {PAGE + 9} tokens can be decoded"):
        state.look()


@KINDS
def test_hypotheses_share_the_speech_and_go_on_from_each_other(paged):
    lengths, most = [40, 7, 2], 2 * PAGE + 9
    state = DecoderState(SIZES, 3, most, 40, paged=paged)
    state.admit_all(PackedLayout.from_lengths(lengths), _speech(lengths))
    tokens, existing = _Tokens(3), _split(lengths)
    for _ in range(3):
        tokens.step(state)
    state.widen(2)
    with pytest.raises(ValueError, match="`hypotheses` must be 1 before"):
        state.widen(2)
    assert (state.num_sequences, state.hypotheses, state.num_rows) == (3, 2, 6)
    tokens.rows = [list(tokens.rows[row // 2]) for row in range(6)]
    draw = torch.Generator().manual_seed(3)
    for number in range(most - 3):
        if number == PAGE + 4:
            state.keep([0, 2])
            tokens.rows, existing = tokens.rows[:2] + tokens.rows[4:], [existing[0], existing[2]]
        tokens.step(state)
        count = state.num_rows
        parents = torch.arange(count) // 2 * 2 + torch.randint(2, (count,), generator=draw)
        state.reorder(parents)
        tokens.rows = [list(tokens.rows[parent]) for parent in parents.tolist()]
        _check_speech(state, existing, hypotheses=2)
    assert state.length == most
    with pytest.raises(ValueError, match=rf"at most {most} tokens.*raise `max_tokens`"):
        state.look()
    state.keep([])
    assert state.num_rows == 0


def test_rows_that_are_kept_move_together_and_there_is_room_again():
    lengths = [5, 60, 9, 17, 30]
    state = DecoderState(SIZES, 5, 64, 60, paged=False)
    state.admit(range(5), lengths, [64] * 5, _speech(lengths))
    tokens, existing = _Tokens(5), _split(lengths)
    for _ in range(20):
        tokens.step(state)
    state.keep([0, 4, 2])
    tokens.rows = [tokens.rows[row] for row in (0, 4, 2)]
    existing = [existing[row] for row in (0, 4, 2)]
    _check_speech(state, existing)
    tokens.step(state)
    state.extend(5)
    tokens.rows += [[], []]
    tokens.step(state)
    assert state.positions.tolist() == [22, 22, 22, 0, 0]
    tokens.rows[3:] = [[], []]
    state.admit([3], [44], [64], _speech([44], seed=2))
    _check_speech(state, [*existing, *_split([44], seed=2)])
    tokens.step(state)
    with pytest.raises(ValueError, match="must not be less than the places they get, but 0 gets 1"):
        state.keep([1, 0])


def test_pages_go_back_and_are_given_again():
    cache = PagedCache(SIZES, 3, longest=3 * PAGE, pages=5)
    cache.take([0, 2], [2 * PAGE + 1, PAGE])
    assert cache.free == 1
    used = cache.table[0].tolist() + cache.table[2, :1].tolist()
    assert len(set(used)) == 4
    assert 0 not in used
    assert cache.table[1].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"the 1 pages that are free.*33 places need 2"):
        cache.take([1], [PAGE + 1])
    with pytest.raises(ValueError, match=r"3 of a row, but 97 places need 4"):
        PagedCache(SIZES, 1, 3 * PAGE, 9).take([0], [3 * PAGE + 1])
    cache.release([0])
    assert cache.free == 4
    assert cache.table[0].tolist() == [0, 0, 0]
    cache.take([1], [3 * PAGE])
    assert cache.free == 1


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 32, 48])
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(width):
    sizes = CacheSizes(1, 2, width, torch.float32, torch.device("cpu"))
    q = torch.randn(1, 2, width)
    k, v = torch.randn(2, 19, 2, width)

    def attended(others):
        cache = ContiguousCache(sizes, 4 * (1 + len(others) // 4))
        lengths = [19, *others, *[0] * (-(1 + len(others)) % 4)]
        more = torch.randn(2, sum(lengths) - 19, 2, width)
        both = [torch.cat([item, other]) for item, other in zip((k, v), more, strict=True)]
        cache.loader(range(len(lengths)), lengths)(0, *both)
        cache.look(lengths)
        return cache.attend(0, torch.cat([q, torch.randn(len(lengths) - 1, 2, width)]))[0]

    alone = attended([])
    for others in ([3], [200, 7, 31], [100, 500, 1, 40, 33, 250, 19], [18] * 15):
        assert torch.equal(attended(others), alone)


class _Rows:
    """A cache, and copies of what each of its rows has: (layers, 2, places, H, D)."""

    def __init__(self, count):
        self.cache = SharedPageCache(SIZES, count)
        self.held = [None] * count
        self.seed = 0

    def admit(self, rows, lengths):
        self.seed += 1
        both = _draw(LAYERS, 2, sum(lengths), HEADS, WIDTH, seed=self.seed)
        write = self.cache.loader(rows, lengths)
        for layer in range(LAYERS):
            write(layer, *both[layer])
        for row, piece in zip(rows, both.split(lengths, 2), strict=True):
            self.held[row] = piece

    def release(self, rows):
        self.cache.release(rows)
        for row in rows:
            self.held[row] = None

    def select(self, rows):
        self.cache.select(rows)
        self.held = [self.held[row] for row in rows]

    def step(self):
        """Give each row a place, and compare what it then attends to."""
        self.seed += 1
        count = len(self.held)
        new = _draw(LAYERS, 2, count, HEADS, WIDTH, seed=self.seed)
        q = _draw(count, 2 * HEADS, WIDTH, seed=-self.seed)
        for row, held in enumerate(self.held):
            if held is not None:
                self.held[row] = torch.cat([held, new[:, :, row, None]], 2)
        self.cache.look([0 if held is None else held.shape[2] for held in self.held])
        for layer in range(LAYERS):
            result = self.cache.attend(layer, q, *new[layer], 0.3)
            for row, held in enumerate(self.held):
                if held is None:
                    continue
                k, v = held[layer].repeat_interleave(2, 2)
                weights = (torch.einsum("hd,lhd->hl", q[row], k) * 0.3).softmax(-1)
                torch.testing.assert_close(result[row], torch.einsum("hl,lhd->hd", weights, v))


def test_hypotheses_copy_only_the_page_that_is_not_full():
    rows = _Rows(1)
    rows.cache.reserve(20, 2 * PAGE + 9)
    rows.admit([0], [2 * PAGE + 5])
    rows.select([0] * 4)
    assert rows.cache.used == 3
    rows.step()
    assert rows.cache.used == 2 + 4
    rows.select([1, 1, 1, 2])
    assert rows.cache.used == 2 + 2
    rows.step()
    assert rows.cache.used == 2 + 4
    rows.release(range(4))
    # Of full pages nothing is copied.
    rows.admit([0], [PAGE])
    rows.select([0] * 4)
    assert rows.cache.used == 1
    rows.step()
    assert rows.cache.used == 1 + 4


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 2 * PAGE + 7])
def test_the_most_pages_are_enough_and_are_reached(length, beams):
    """Hypotheses that part at once take them all, in a pool that has no more."""
    more = PAGE + 3
    most = most_pages(length, more, beams)
    rows = _Rows(1)
    rows.cache.reserve(most, length + more)
    rows.admit([0], [length])
    rows.select([0] * beams)
    for _ in range(more):
        rows.step()
    assert rows.cache.used == most == len(rows.cache._readers)


def test_a_pool_that_grows_keeps_what_it_held():
    rows = _Rows(2)
    rows.cache.reserve(2, PAGE + 8)
    rows.admit([0], [PAGE + 3])
    rows.step()
    rows.cache.reserve(3, PAGE + 8)
    assert rows.cache.pages.shape[2] == 4
    rows.cache.reserve(9, 5 * PAGE)
    assert rows.cache.pages.shape[2] == 9
    rows.admit([1], [4 * PAGE])
    rows.step()
    assert rows.cache.used == 2 + 5
    rows.cache.reserve(3, 1)
    assert rows.cache.pages.shape[2] == 9
    rows.cache.reserve(10, 1, most=11)
    assert rows.cache.pages.shape[2] == 11
    rows.step()


def test_pages_that_were_not_reserved_are_refused():
    rows = _Rows(1)
    rows.cache.reserve(1, 2 * PAGE)
    with pytest.raises(ValueError, match="`reserve` must have made room for more than 1 pages"):
        rows.admit([0], [PAGE + 1])
