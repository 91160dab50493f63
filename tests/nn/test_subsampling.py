import numpy as np
import pytest
import torch
from torch import nn

from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import MelFrames
from effasr.nn.convolution import ConformerConvolution
from effasr.nn.subsampling import ConvSubsampling
from effasr_kernels import PackedLayout

BINS, CHANNELS, WIDTH = 16, 6, 10


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


def alone(module, rows, causal):
    """The layers of one utterance; NeMo's causal ones see two zeros before, and one after."""
    padding = (2, 1, 2, 1) if causal else (1, 1, 1, 1)
    conv = lambda layer, x: nn.functional.conv2d(
        nn.functional.pad(x, padding), layer.weight, layer.bias, stride=2, groups=layer.groups
    )
    x = conv(module.conv, rows[None, None]).relu()
    for depthwise, pointwise in module.stages():
        x = pointwise(conv(depthwise, x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu()
    return module.linear(x[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bins", [16, 80])
def test_a_pack_is_each_utterance_alone(factor, bins, causal):
    torch.manual_seed(0)
    lengths = (37, 1, 0, 8, 9, 64, 3, 7, 2, 15, 16, 24, 6, 5, 4)
    module = ConvSubsampling(bins, CHANNELS, WIDTH, factor, causal=causal).double()
    framing = Framing(hop=1, subsampling=factor, causal=causal)
    frames = [framing.frames(length) for length in lengths]
    layout = PackedLayout.from_lengths(frames, rows=sum(frames) + 3, num_sequences=17)
    real = torch.tensor([*lengths, 0, 0])
    mel = MelFrames(torch.randn(factor * layout.rows, bins).double(), layout, real, factor)
    # The operation of plain layers never reads what is not real.
    mel.values.masked_fill_(~mel.mask[:, None], 0.0 if causal else torch.nan)
    out = module(mel.with_values(mel.values.requires_grad_()))
    total, counted = torch.zeros(()), torch.zeros(())
    for n, length in enumerate(lengths):
        result = out[layout.cu_seqlens_host[n] : layout.cu_seqlens_host[n + 1]]
        if not length:
            continue
        start = factor * layout.cu_seqlens_host[n]
        rows = mel.values.detach()[start : start + length].requires_grad_()
        expected = alone(module, rows, causal)
        torch.testing.assert_close(result, expected)
        weights = torch.randn_like(expected)
        (grad,) = torch.autograd.grad((result * weights).sum(), mel.values, retain_graph=True)
        local = (expected * weights).sum()
        (of_rows,) = torch.autograd.grad(local, rows, retain_graph=True)
        torch.testing.assert_close(grad[start : start + length], of_rows)
        total, counted = total + (result * weights).sum(), counted + local
        assert not causal or framing.frames(framing.samples_of(len(expected))) == len(expected)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(module.parameters())),
        torch.autograd.grad(counted, list(module.parameters())),
    )
    assert framing.frames(np.array(lengths)).tolist() == frames


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
    module, mel = subsampling(factor), mel_frames((37, 1, 0, 8, 9, 64, 3), factor)
    expected = module(mel)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(mel)
    assert out.dtype == torch.bfloat16
    total = mel.layout.total
    error = (out.float() - expected)[:total].abs().max()
    assert 0 < error < 0.05 * expected[:total].abs().max()


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


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm"])
def test_it_is_the_layers_of_torch_on_each_sequence(norm, tail):
    torch.manual_seed(0)
    module = ConformerConvolution(6, 3, norm=norm).double()
    for parameter in module.norm.parameters():
        nn.init.normal_(parameter)
    theirs = nn.BatchNorm1d(6).double() if norm == "batch_norm" else module.norm
    theirs.load_state_dict(module.norm.state_dict())
    layout = PackedLayout.from_lengths([4, 0, 7], rows=11 + tail)
    x = torch.randn(11 + tail, 6, dtype=torch.float64, requires_grad=True)
    actual = module(x, layout)[:11]
    weight, bias = module.depthwise.weight[:, None], module.depthwise.bias
    convolved = [
        nn.functional.conv1d(piece.T, weight, bias, padding=1, groups=6).T
        for piece in nn.functional.glu(module.pointwise1(x[:11])).split([4, 7])
    ]
    expected = module.pointwise2(nn.functional.silu(theirs(torch.cat(convolved))))
    torch.testing.assert_close(actual, expected)
    leaves = [x, *(p for name, p in module.named_parameters() if "norm" not in name)]
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), [*leaves, *module.norm.parameters()]),
        torch.autograd.grad(expected.square().sum(), [*leaves, *theirs.parameters()]),
    )
    if norm == "batch_norm":
        torch.testing.assert_close(module.norm.running_mean, theirs.running_mean)
        torch.testing.assert_close(module.norm.running_var, theirs.running_var)


def test_biases_can_be_left_out():
    module = ConformerConvolution(6, 3, norm="layer_norm", bias=False)
    names = {name for name, _ in module.named_parameters() if "norm" not in name}
    assert names == {"pointwise1.weight", "depthwise.weight", "pointwise2.weight"}
