"""Conversations of a language model in pages, against the contiguous cache."""

import pytest
import torch

from effasr.decoding.language_model.engine import CachedConversations
from effasr_kernels import PackedLayout, PackedSequence
from tests.support.speech_llm import architecture

pytest.importorskip("transformers")
LENGTHS = 40, 5, 32


def _logits(model, device: torch.device, *, paged: bool) -> list[torch.Tensor]:
    """Those of some steps of rows that are admitted, continued by several, and released."""
    draw = torch.Generator().manual_seed(1)
    pieces = [torch.randn(n, 48, generator=draw) for n in LENGTHS]
    packed = lambda x: PackedSequence(
        torch.cat(x).to(device), PackedLayout.from_lengths([len(one) for one in x], device)
    )
    cache = CachedConversations(model.to(device), 2, torch.float32, paged=paged)
    cache.reserve(12, 48)
    cache.admit([0, 1], packed(pieces[:2]))
    found = [cache.logits()]
    cache.read([4, 9])
    cache.select([0, 1, 0, 1])
    cache.read([3, 8, 5, 11])
    found.append(cache.logits())
    cache.release([1])
    cache.admit([1], packed(pieces[2:]))
    cache.read([7, 1, 2, 6])
    found.append(cache.logits())
    assert cache.lengths == [43, 33, 43, 8]
    return [x.cpu() for x in found]


@torch.no_grad()
def test_pages_hold_what_a_contiguous_cache_does(device: torch.device) -> None:
    from effasr.model.language_model.config import LanguageModelConfig
    from effasr.model.language_model.model import LanguageModel

    torch.manual_seed(0)
    config = LanguageModelConfig(architecture=architecture("qwen3"), stack=1, weights="random")
    model = LanguageModel(config, 8).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
    expected = _logits(model, torch.device("cpu"), paged=False)
    found = _logits(model, device, paged=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
