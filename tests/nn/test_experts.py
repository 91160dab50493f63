"""Feed-forward networks with experts against dense networks with the same weights."""

from itertools import pairwise

import pytest
import torch

from effasr.data.prompt import Prompt
from effasr.nn import experts
from effasr.nn import residual as residuals
from effasr.nn.experts import ExpertFeedForward, ExpertsConfig, Groups, Router
from effasr.nn.feed_forward import FeedForward
from effasr.nn.residual import Residual
from effasr.nn.stack import Layer, checkpointed_forward
from effasr_kernels import PackedLayout

WIDTH, HIDDEN = 6, 10
LENGTHS = (4, 0, 3, 5)
NAMED = ExpertsConfig(count=3, route="language", names=("de", "en", "fr"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def _experts(config, **options):
    module = ExpertFeedForward(WIDTH, HIDDEN, config, activation="silu", **options)
    with torch.no_grad():
        for layer in (module.linear1, module.linear2):
            if layer.bias is not None:
                layer.bias.normal_()
    return module


def _dense(module, expert):
    """A network without experts with the weights of one."""
    has_bias = module.linear1.bias is not None
    dense = FeedForward(WIDTH, HIDDEN, activation="silu", bias=has_bias)
    dense.load_state_dict(
        {k: v[expert] for k, v in module.state_dict().items() if not k.startswith("router")}
    )
    return dense.to(module.linear1.weight.dtype)


def _residual(layout):
    return Residual(layout, 0.0, None)


def _rows(layout):
    x = torch.randn(layout.rows, WIDTH, dtype=torch.float64)
    x[layout.total :] = 7.0
    return x


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tail", [0, 3])
def test_names_choose_the_network_of_an_utterance(tail, bias):
    layout = PackedLayout.from_lengths(LENGTHS, rows=sum(LENGTHS) + tail)
    module, x = _experts(NAMED, bias=bias).double(), _rows(layout)
    expert = torch.tensor([2, 1, 0, 2])
    groups = Groups.of_sequences(expert, layout, NAMED.count)
    y = module(x, _residual(layout), groups=groups)
    for number, (begin, end) in zip(expert.tolist(), pairwise(layout.cu_seqlens_host), strict=True):
        torch.testing.assert_close(y[begin:end], _dense(module, number)(x[begin:end]))
    assert not y[layout.total :].any()
    assert module.rows.tolist() == [3, 0, 9]
    with pytest.raises(ValueError, match=r"`groups` must be given where the language of an utter"):
        module(x)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_router_adds_the_networks_that_it_chooses(top_k):
    layout = PackedLayout.from_lengths(LENGTHS, rows=sum(LENGTHS) + 2)
    module, x = _experts(ExpertsConfig(count=3, top_k=top_k)).double(), _rows(layout)
    y = module(x, _residual(layout))
    probabilities = (x @ module.router.weight.T).softmax(-1)
    for row in range(layout.total):
        chosen = probabilities[row].sort(descending=True).indices[:top_k]
        gates = probabilities[row, chosen]
        gates = gates if top_k == 1 else gates / gates.sum()
        parts = [g * _dense(module, int(e))(x[row]) for g, e in zip(gates, chosen, strict=True)]
        torch.testing.assert_close(y[row], torch.stack(parts).sum(0))
    assert not y[layout.total :].any()
    assert module.rows.sum() == top_k * layout.total
    # Without a layout every row counts, as in a step of decoding.
    torch.testing.assert_close(module(x[: layout.total]), y[: layout.total])


def test_the_balance_loss_is_1_for_even_choices_and_most_for_a_single_one():
    router = Router(4, 4, 1)
    with torch.no_grad():
        router.weight.copy_(20 * torch.eye(4))
    torch.testing.assert_close(router(torch.eye(4)).losses[0], torch.tensor(1.0))
    single = router(torch.eye(4)[:1].expand(8, -1))
    torch.testing.assert_close(single.losses[0], torch.tensor(4.0))
    assert single.expert.flatten().tolist() == [0] * 8
    # With logits of 0 the normalizer is log 4.
    flat = router(torch.zeros(3, 4))
    torch.testing.assert_close(flat.losses[1], torch.tensor(4.0).log() ** 2)


def test_a_tail_changes_no_loss_of_the_router():
    router, x = Router(WIDTH, 3, 2), torch.randn(5, WIDTH)
    whole = router(x).losses
    (expected,) = torch.autograd.grad(whole.sum(), router.weight)
    longer = torch.cat([x, torch.full((2, WIDTH), 100.0)])
    routed = router(longer, torch.arange(7) < 5)
    torch.testing.assert_close(routed.losses, whole)
    (gradient,) = torch.autograd.grad(routed.losses.sum(), router.weight)
    torch.testing.assert_close(gradient, expected)
    assert routed.expert[5:].tolist() == [[3, 3]] * 2
    assert not routed.gate[5:].any()
    assert not router(longer, torch.zeros(7, dtype=torch.bool)).losses.any()


class _Recomputed(Layer):
    def __init__(self, module):
        super().__init__()
        self.module, self.is_checkpointed = module, True

    @checkpointed_forward
    def forward(self, x):
        return self.module(x)


def test_recomputed_rows_count_once_and_evaluated_rows_never():
    module = _experts(ExpertsConfig(count=2))
    layer, x = _Recomputed(module), torch.randn(5, WIDTH, requires_grad=True)
    layer(x).sum().backward()
    assert module.rows.sum() == 5
    module.eval()
    module(x)
    assert module.rows.sum() == 5


@pytest.mark.parametrize("config", [NAMED, ExpertsConfig(count=3, top_k=2)], ids=["named", "top2"])
def test_joined_steps_are_the_separate_ones(config, monkeypatch):
    """With the operations that a GPU runs, here their references."""
    layout = PackedLayout.from_lengths(LENGTHS, rows=sum(LENGTHS) + 2)
    module, x = _experts(config).double(), _rows(layout)
    groups = None
    if not config.is_learned:
        groups = Groups.of_sequences(torch.tensor([2, 1, 0, 2]), layout, config.count)
    call = lambda: module(x, _residual(layout), groups=groups)
    separate = call()
    for position in (residuals, experts):
        monkeypatch.setattr(position, "is_fused", lambda x: True)
    torch.testing.assert_close(call(), separate)


def test_a_name_chooses_the_expert():
    assert NAMED.number_of(Prompt("en", "en")) == 1
    tasks = ExpertsConfig(count=2, route="task", names=("translate", "transcribe"))
    assert tasks.number_of(Prompt("nl", "nl")) == 1
    assert tasks.number_of(Prompt("nl", "en", "translate")) == 0
