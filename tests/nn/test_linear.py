"""Linear layers as one product, of which some have no bias."""

import pytest
import torch
from torch import nn

from effasr.nn.attention import CrossAttention
from effasr.nn.linear import JoinedLinear
from effasr.nn.lora import LoRAConfig, LoRALinear, adapt, merged


@pytest.mark.parametrize("biased", [(True, False, True), (False, True), (True, False)])
def test_it_is_its_parts(biased):
    torch.manual_seed(0)
    joined = JoinedLinear(5, 4, biased)
    assert not joined.bias.any()
    nn.init.normal_(joined.bias)
    weights, biases = joined.weight.chunk(len(biased)), iter(joined.bias.split(4))
    x = torch.randn(3, 5)
    expected = [
        nn.functional.linear(x, weight, next(biases) if has else None)
        for weight, has in zip(weights, biased, strict=True)
    ]
    torch.testing.assert_close(joined(x), torch.cat(expected, -1))
    joined(x).sum().backward()
    torch.testing.assert_close(joined.bias.grad, torch.full_like(joined.bias, 3.0))


def test_adapters_stand_beside_it():
    torch.manual_seed(0)
    module = CrossAttention(8, 2, 4, key_bias=False)
    nn.init.normal_(module.kv_proj.bias)
    x = torch.randn(3, 8)
    before = module.kv_proj(x)
    adapt(module, LoRAConfig(rank=2))
    assert isinstance(module.kv_proj, LoRALinear)
    assert torch.equal(module.kv_proj(x), before)
    nn.init.normal_(module.kv_proj.lora_b)
    adapted = module.kv_proj(x)
    with merged(module):
        torch.testing.assert_close(module.kv_proj(x), adapted)
    assert not torch.equal(adapted, before)
