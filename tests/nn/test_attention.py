import torch
from torch import nn

from effasr.nn.attention import CrossAttention, RelativeSelfAttention, SelfAttention
from effasr.nn.positions import relative_sinusoids
from effasr_kernels import PackedLayout, Rotary

WIDTH, HEADS, HEAD = 12, 3, 8


def test_self_attention_is_torch_multi_head_attention():
    torch.manual_seed(0)
    ours = SelfAttention(12, 3, 4, causal=True)
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv_proj.weight,
            "in_proj_bias": ours.qkv_proj.bias,
            "out_proj.weight": ours.o_proj.weight,
            "out_proj.bias": ours.o_proj.bias,
        }
    )
    x = torch.randn(5, 12)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = theirs(x[None], x[None], x[None], attn_mask=hidden)
    actual = ours(x, PackedLayout.from_lengths([5]))
    torch.testing.assert_close(actual, expected[0], atol=1e-6, rtol=1e-5)


def test_positions_matter_only_where_they_are_asked_for():
    torch.manual_seed(0)
    layout = PackedLayout.from_lengths([6])
    x = torch.randn(6, WIDTH)
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    embeddings = relative_sinusoids(6, WIDTH, torch.device("cpu"))
    plain = SelfAttention(WIDTH, HEADS, HEAD)
    torch.testing.assert_close(plain(x[order], layout), plain(x, layout)[order])
    for module in (
        SelfAttention(WIDTH, HEADS, HEAD, rotary=Rotary()),
        RelativeSelfAttention(WIDTH, HEADS, HEAD),
    ):
        moved = module(x[order], layout, embeddings)
        assert (moved - module(x, layout, embeddings)[order]).abs().max() > 1e-3


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
