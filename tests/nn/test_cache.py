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
