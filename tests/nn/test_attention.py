import torch

from effasr.nn.attention import CrossAttention, SelfAttention
from effasr_kernels import PackedLayout

WIDTH, HEADS, HEAD = 12, 3, 8


def test_cross_attention_gives_the_penalty_only_on_request():
    torch.manual_seed(0)
    module = CrossAttention(WIDTH, HEADS, HEAD)
    layout, layout_encoded = PackedLayout.from_lengths([2, 3]), PackedLayout.from_lengths([7, 4])
    x, encoded = torch.randn(5, WIDTH), torch.randn(11, WIDTH)
    plain, none = module(x, layout, encoded, layout_encoded)
    guided, penalty = module(x, layout, encoded, layout_encoded, sigma=0.3)
    assert none is None
    assert penalty.shape == (5,)
    assert ((penalty > 0) & (penalty < 1)).all()
    torch.testing.assert_close(plain, guided)


def test_dropout_is_off_in_evaluation_and_follows_the_global_seed():
    module = SelfAttention(WIDTH, HEADS, HEAD, dropout=0.5)
    layout, x = PackedLayout.from_lengths([8]), torch.randn(8, WIDTH)
    torch.manual_seed(3)
    first = module(x, layout)
    assert not torch.equal(module(x, layout), first)
    torch.manual_seed(3)
    assert torch.equal(module(x, layout), first)
    module.eval()
    assert torch.equal(module(x, layout), module(x, layout))
