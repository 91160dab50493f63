import pytest
import torch

from effasr.nn.cache import DecoderState, SelfCache
from effasr_kernels import PackedLayout


def test_a_self_cache_returns_all_tokens_so_far() -> None:
    cache = SelfCache(room=2)
    first, second = torch.randn(2, 3, 4, 5).unbind(0)
    keys, values = cache.append(first, -first)
    assert torch.equal(keys, first[:, :, None])
    keys, values = cache.append(second, -second)
    assert torch.equal(keys, torch.stack([first, second], dim=2))
    assert torch.equal(values, -keys)
    with pytest.raises(ValueError, match=r"at most 2 tokens.*raise `max_tokens`"):
        cache.append(first, first)


def test_keeping_sequences_compacts_every_cache() -> None:
    lengths = [2, 0, 3, 1]
    k, v = torch.randn(2, 7, 1, 4).unbind(0)
    state = DecoderState([(k[:6], v[:6])], PackedLayout.from_lengths(lengths), max_tokens=3)
    new = torch.randn(4, 1, 4)
    state.self_caches[0].append(new, new)

    state.keep([3, 0, 0])
    assert state.num_sequences == 3
    cross = state.cross_caches[0]
    assert cross.layout_encoded.lengths == (1, 2, 2)
    assert cross.layout_step.lengths == (1, 1, 1)
    assert torch.equal(cross.keys, k[[5, 0, 1, 0, 1]])
    assert torch.equal(cross.values, v[[5, 0, 1, 0, 1]])
    keys, _ = state.self_caches[0].append(new[:3], new[:3])
    assert torch.equal(keys[:, :, 0], new[[3, 0, 0]])

    state.keep([])
    assert state.num_sequences == 0
    assert state.cross_caches[0].keys.shape == (0, 1, 4)


def test_a_tail_is_dropped_with_the_first_choice() -> None:
    layout = PackedLayout.from_lengths([2, 1], rows=6)
    k = torch.randn(6, 1, 4)
    state = DecoderState([(k, k)], layout, max_tokens=1)
    state.keep(range(2))
    assert torch.equal(state.cross_caches[0].keys, k[:3])


def test_hypotheses_share_the_speech_and_go_on_from_each_other() -> None:
    k, v = torch.randn(2, 5, 1, 4).unbind(0)
    state = DecoderState([(k, v)], PackedLayout.from_lengths([2, 3]), max_tokens=3)
    first = torch.randn(2, 1, 4)
    state.self_caches[0].append(first, -first)

    state.widen(2)
    assert (state.num_sequences, state.hypotheses, state.num_rows) == (2, 2, 4)
    cross = state.cross_caches[0]
    assert cross.keys is k
    assert cross.values is v
    assert cross.layout_encoded.lengths == (2, 3)
    assert cross.layout_step.lengths == (2, 2)
    second = torch.randn(4, 1, 4)
    keys, values = state.self_caches[0].append(second, -second)
    assert torch.equal(keys, torch.stack([first[[0, 0, 1, 1]], second], 2))
    assert torch.equal(values, -keys)
    with pytest.raises(ValueError, match="`hypotheses` must be 1 before"):
        state.widen(2)

    state.reorder(torch.tensor([1, 1, 3, 2]))
    state.keep([1])
    assert state.num_rows == 2
    assert torch.equal(state.cross_caches[0].keys, k[2:])
    keys, _ = state.self_caches[0].append(second[:2], second[:2])
    assert torch.equal(keys[:, :, :2], torch.stack([first[[1, 1]], second[[3, 2]]], 2))
