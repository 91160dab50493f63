import numpy as np
import pytest
import torch
from torch import nn

from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import MelFrames
from effasr.nn.subsampling import ConvSubsampling
from effasr_kernels import PackedLayout

BINS, CHANNELS, WIDTH = 16, 6, 10
LENGTHS = (37, 1, 0, 8, 9, 64, 3)


@pytest.fixture(params=[4, 8])
def factor(request):
    return request.param


def mel_frames(lengths, factor, spare=3, extra=2):
    torch.manual_seed(1)
    frames = [-(-length // factor) for length in lengths]
    layout = PackedLayout.from_lengths(
        frames, rows=sum(frames) + spare, num_sequences=len(lengths) + extra
    )
    mel = MelFrames(
        torch.randn(factor * layout.rows, BINS),
        layout,
        torch.tensor([*lengths, *[0] * extra], dtype=torch.int64),
        factor,
    )
    mel.values.masked_fill_(~mel.mask[:, None], 0.0)
    return mel


def subsampling(factor):
    torch.manual_seed(0)
    module = ConvSubsampling(BINS, CHANNELS, WIDTH, factor)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def rows_of(mel, n):
    start = mel.subsampling * mel.layout.cu_seqlens_host[n]
    return mel.values[start : start + int(mel.lengths[n])]


def alone(module, rows):
    """The layers of one utterance without any padding: (L, BINS) to (n, WIDTH)."""
    x = module.conv(rows[None, None]).relu()
    stages = [(module.depthwise1, module.pointwise1)]
    if module.factor == 8:
        stages.append((module.depthwise2, module.pointwise2))
    for depthwise, pointwise in stages:
        x = pointwise(depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu()
    return module.linear(x[0].transpose(0, 1).flatten(1))


def causally_alone(module, rows):
    """NeMo's causal layers of one utterance: two zeros before, one after, in time and bands."""
    before = lambda x: nn.functional.pad(x, (2, 1, 2, 1))
    plain = lambda conv, x: nn.functional.conv2d(
        before(x), conv.weight, conv.bias, stride=2, groups=conv.groups
    )
    x = plain(module.conv, rows[None, None]).relu()
    for depthwise, pointwise in module.stages():
        x = plain(depthwise, x)
        x = pointwise(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu()
    return module.linear(x[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("bins", [16, 80])
def test_a_causal_pack_is_each_utterance_alone(factor, bins):
    torch.manual_seed(0)
    lengths = (37, 1, 0, 8, 9, 64, 3, 7, 2, 15, 16, 24, 6, 5, 4)
    module = ConvSubsampling(bins, CHANNELS, WIDTH, factor, causal=True).double()
    framing = Framing(hop=1, subsampling=factor, causal=True)
    frames = [framing.frames(length) for length in lengths]
    layout = PackedLayout.from_lengths(frames, rows=sum(frames) + 3, num_sequences=17)
    real = torch.tensor([*lengths, 0, 0])
    mel = MelFrames(torch.randn(factor * layout.rows, bins).double(), layout, real, factor)
    mel.values.masked_fill_(~mel.mask[:, None], 0.0)
    mel.values.requires_grad_()
    out = module(mel)
    for n, length in enumerate(lengths):
        start = factor * layout.cu_seqlens_host[n]
        result = out[layout.cu_seqlens_host[n] : layout.cu_seqlens_host[n + 1]]
        if not length:
            continue
        rows = mel.values.detach()[start : start + length].requires_grad_()
        expected = causally_alone(module, rows)
        torch.testing.assert_close(result, expected)
        weights = torch.randn_like(expected)
        (grad,) = torch.autograd.grad((result * weights).sum(), mel.values, retain_graph=True)
        (local,) = torch.autograd.grad((expected * weights).sum(), rows)
        torch.testing.assert_close(grad[start : start + length], local)
        assert framing.frames(framing.samples_of(len(expected))) == len(expected)
    counted = framing.frames(np.array(lengths))
    assert counted.tolist() == frames


def test_a_pack_is_each_utterance_alone(factor):
    module, mel = subsampling(factor), mel_frames(LENGTHS, factor)
    out = module(mel)
    assert out.shape == (mel.layout.rows, WIDTH)
    assert torch.isfinite(out).all()
    pieces = out[: mel.layout.total].split(mel.layout.lengths)
    for n, length in enumerate(LENGTHS):
        if length:
            torch.testing.assert_close(pieces[n], alone(module, rows_of(mel, n)))


def test_gradients_are_those_of_each_utterance_alone(factor):
    module, mel = subsampling(factor), mel_frames(LENGTHS, factor)
    module(mel)[: mel.layout.total].square().sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    for n, length in enumerate(LENGTHS):
        if length:
            alone(module, rows_of(mel, n)).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-3, msg=name)


def test_a_neighbour_is_never_seen(factor):
    module, mel = subsampling(factor), mel_frames(LENGTHS, factor)
    expected = module(mel)
    start, end = (factor * mel.layout.cu_seqlens_host[n] for n in (3, 4))
    poisoned = mel.values.clone()
    poisoned[:start] = torch.nan
    poisoned[end:] = torch.nan
    begin, stop = mel.layout.cu_seqlens_host[3:5]
    assert torch.equal(module(mel.with_values(poisoned))[begin:stop], expected[begin:stop])


def test_parameters_are_those_of_plain_convolutions(factor):
    """Checkpoints and the weights of Hugging Face have these names and shapes."""
    shapes = {name: tuple(x.shape) for name, x in subsampling(factor).state_dict().items()}
    second = {
        "depthwise2.weight": (CHANNELS, 1, 3, 3),
        "depthwise2.bias": (CHANNELS,),
        "pointwise2.weight": (CHANNELS, CHANNELS),
        "pointwise2.bias": (CHANNELS,),
    }
    assert shapes == {
        "conv.weight": (CHANNELS, 1, 3, 3),
        "conv.bias": (CHANNELS,),
        "depthwise1.weight": (CHANNELS, 1, 3, 3),
        "depthwise1.bias": (CHANNELS,),
        "pointwise1.weight": (CHANNELS, CHANNELS),
        "pointwise1.bias": (CHANNELS,),
        **(second if factor == 8 else {}),
        "linear.weight": (WIDTH, CHANNELS * BINS // factor),
        "linear.bias": (WIDTH,),
    }


def test_under_autocast_products_are_narrow(factor):
    module, mel = subsampling(factor), mel_frames(LENGTHS, factor)
    expected = module(mel)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(mel)
    assert out.dtype == torch.bfloat16
    total = mel.layout.total
    error = (out.float() - expected)[:total].abs().max()
    assert 0 < error < 0.05 * expected[:total].abs().max()


def test_a_batch_of_nothing_has_no_frames(factor):
    module = subsampling(factor)
    assert module(mel_frames((0, 0), factor, spare=0)).shape == (0, WIDTH)
    assert module(mel_frames((), factor, spare=0, extra=0)).shape == (0, WIDTH)
    out = module(mel_frames((0,), factor, spare=4))
    assert out.shape == (4, WIDTH)
    out.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_copies_no_rows(causal):
    """An activation in place on the view that a linear layer returns would have copies made."""
    y = ConvSubsampling(16, 4, 6, causal=causal)(mel_frames((3, 2), 8))
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    names = {node.name() for node in seen}
    assert any("Relu" in name for name in names)
    assert not any("CopySlices" in name for name in names)
