"""Rows share pages, and attend to what they would have alone."""

import random

import pytest
import torch

from effasr.nn.cache.contiguous import CacheSizes
from effasr.nn.cache.paged import PAGE, SharedPageCache, most_pages

LAYERS, HEADS, WIDTH = 2, 2, 8
SIZES = CacheSizes(LAYERS, HEADS, WIDTH, torch.float64, torch.device("cpu"))


def _draw(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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
            found = self.cache.attend(layer, q, *new[layer], 0.3)
            for row, held in enumerate(self.held):
                if held is None:
                    continue
                k, v = held[layer].repeat_interleave(2, 2)
                weights = (torch.einsum("hd,lhd->hl", q[row], k) * 0.3).softmax(-1)
                torch.testing.assert_close(found[row], torch.einsum("hl,lhd->hd", weights, v))


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_admitted_continued_and_released_in_any_order(seed):
    draw = random.Random(seed)
    rows = _Rows(4)
    rows.cache.reserve(60, 200)
    for _ in range(60):
        held = [row for row, one in enumerate(rows.held) if one is not None]
        what = draw.random()
        if what < 0.2 or not held:
            entering = draw.sample(range(len(rows.held)), draw.randint(1, 2))
            rows.admit(entering, [draw.choice([1, 5, PAGE, PAGE + 1, 70]) for _ in entering])
        elif what < 0.3:
            rows.release([draw.choice(held)])
        elif what < 0.5:
            rows.select([draw.randrange(len(rows.held)) for _ in range(draw.randint(2, 6))])
        else:
            rows.step()
    assert rows.cache.used
    rows.release(range(len(rows.held)))
    assert not rows.cache.used


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


def test_hypotheses_of_full_pages_copy_nothing():
    rows = _Rows(1)
    rows.cache.reserve(5, PAGE + 1)
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


def test_a_pool_that_is_copied_has_at_most_half_of_the_limit():
    cache = SharedPageCache(SIZES, 1)
    sizes = []
    for needed in range(1, 12):
        cache.reserve(needed, 1, most=11)
        sizes.append(cache.pages.shape[2])
    assert sizes == [1, 2, 4, 4, *[11] * 7]


def test_a_table_that_has_not_changed_is_not_copied_again():
    rows = _Rows(1)
    rows.cache.reserve(2, PAGE)
    rows.admit([0], [3])
    rows.step()
    table = rows.cache._table
    rows.release([])
    rows.step()
    assert rows.cache._table is table


def test_pages_that_were_not_reserved_are_refused():
    rows = _Rows(1)
    rows.cache.reserve(1, 2 * PAGE)
    with pytest.raises(ValueError, match="`reserve` must have made room for more than 1 pages"):
        rows.admit([0], [PAGE + 1])
