"""Layers through the joined operations give what PyTorch's own calls give."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import Decoder, DecoderConfig, DecoderLayer
from effasr.model.encoder import ConformerLayer, FastConformerConfig, _Context
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn import attention, feed_forward, residual
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.stack import Layer, apply_activation_checkpointing, is_recomputing, run_layers
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedLayout, PackedSequence
from effasr_kernels.shared.dropout import draw_seeds
from tests.training.conftest import VOCABULARY, make_batch

WIDTH = 16
LAYOUT = PackedLayout.from_lengths((5, 0, 3), rows=10)
DROPOUTS = {"residual_dropout": 0.3, "activation_dropout": 0.2}


@pytest.fixture
def join(monkeypatch):
    """Decides whether joined operations serve; on a CPU these are their references."""

    def decide(joined):
        for module in (residual, feed_forward):
            monkeypatch.setattr(module, "is_fused", lambda x: joined)

    return decide


def _conformer(**options):
    return ConformerLayer(
        FastConformerConfig(width=WIDTH, heads=2, feed_forward=24, position="none", **options)
    )


def _transformer(**options):
    remainder = {"activation": "gelu", "attention_dropout": 0.0, **options}
    return TransformerLayer(WIDTH, heads=2, feed_forward=24, **remainder)


def _decoder(**options):
    return DecoderLayer(DecoderConfig(width=WIDTH, heads=2, feed_forward=24, **options))


KINDS = {"conformer": _conformer, "transformer": _transformer, "decoder": _decoder}


def _made(kind, *, dropout=False):
    torch.manual_seed(0)
    layer = KINDS[kind](**(DROPOUTS if dropout else {})).double()
    for module in layer.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return layer


def _arguments(kind, x):
    if kind == "conformer":
        return x, _Context(LAYOUT, None, None)
    if kind == "transformer":
        return x, LAYOUT
    return x, LAYOUT, PackedSequence(x.detach().flip(1), LAYOUT), None


def _run(layer, kind, seed=1):
    """Return the real rows of the output, and the gradients of the input and the parameters."""
    torch.manual_seed(7)
    x = torch.randn(LAYOUT.rows, WIDTH, dtype=torch.float64)
    upstream = torch.randn_like(x)[: LAYOUT.total]
    x.requires_grad_()
    torch.manual_seed(seed)
    y = layer(*_arguments(kind, x))
    y = (y[0] if isinstance(y, tuple) else y)[: LAYOUT.total]
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
def test_joined_operations_compute_the_same_layer(adapted, kind, join):
    layer = _made(kind)
    if adapted:
        adapt(layer, LoRAConfig(rank=2, also_train=("*norm*",)))
    for name, parameter in layer.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter)
    layer.double()
    join(False)
    expected = _run(layer, kind)
    join(True)
    for a, b in zip(_run(layer, kind), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_drop_the_same_again(kind, join):
    join(True)
    layer = _made(kind, dropout=True)
    expected, other = _run(layer, kind), _run(layer, kind, seed=2)
    assert not torch.equal(expected[0], other[0])
    layer.is_checkpointed = True
    for a, b in zip(_run(layer, kind), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_each_dropout_of_a_layer_is_its_own(kind, join, monkeypatch):
    offsets: list[int] = []

    def noted(operation):
        def call(*args, **options):
            if options.get("dropout"):
                assert options["seed"] is not None
                offsets.append(options["offset"])
            return operation(*args, **options)

        return call

    for module, name in (
        (residual, "dropout_add_layer_norm"),
        (feed_forward, "bias_activation_dropout"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    join(True)
    layer = _made(kind, dropout=True)
    _run(layer, kind)
    assert len(offsets) == {"conformer": 6, "transformer": 3, "decoder": 4}[kind]
    assert len(set(offsets)) == len(offsets)
    offsets.clear()
    layer.eval()
    _run(layer, kind)
    assert not offsets


def _stack(kind):
    """Return three layers with every dropout, and what runs them on an input."""
    options = {**DROPOUTS, "attention_dropout": 0.1}
    if kind == "decoder":
        config = DecoderConfig(width=WIDTH, layers=3, heads=2, feed_forward=24, **options)
        decoder = Decoder(config, 10).double().train()
        tokens = PackedSequence(torch.arange(LAYOUT.rows) % 10, LAYOUT)
        return decoder, lambda x: decoder(tokens, PackedSequence(x, LAYOUT))[0]
    layers = nn.ModuleList(KINDS[kind](**options) for _ in range(3)).double().train()
    provided = _arguments(kind, torch.empty(0, WIDTH))[1:]
    return layers, lambda x: run_layers(layers, "stack", x, LAYOUT, *provided)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_draws_the_seeds_of_its_layers_at_once(kind, join, monkeypatch):
    draws, seeds = [], []

    def noted(operation, found):
        def call(*args, **options):
            found.append(options.get("seed"))
            return operation(*args, **options)

        return call

    monkeypatch.setattr(torch, "randint", noted(torch.randint, draws))
    monkeypatch.setattr(attention, "attention", noted(attention.attention, seeds))
    join(True)
    torch.manual_seed(0)
    stack, run = _stack(kind)
    x = torch.randn(LAYOUT.rows, WIDTH, dtype=torch.float64, requires_grad=True)
    gradients = []
    for is_checkpointed in (False, True):
        draws.clear()
        seeds.clear()
        for module in stack.modules():
            if isinstance(module, Layer):
                module.is_checkpointed = is_checkpointed
        torch.manual_seed(1)
        y = run(x)[: LAYOUT.total]
        # Every attention of every layer has a seed of its own.
        assert len({int(seed) for seed in seeds}) == {"decoder": 6}.get(kind, 3)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
        # A recomputed layer is given its seeds again.
        assert len(draws) == 1
    assert torch.equal(*gradients)
    stack.eval()
    draws.clear()
    run(x)
    assert not draws


def test_kernels_are_compiled_once_for_all_seeds():
    # Addresses that are no multiple of 16 bytes would be compiled for a second time.
    seeds = draw_seeds(5, torch.device("cpu"))
    assert [seed.data_ptr() % 16 for seed in seeds] == [0] * 5
    assert len({int(seed) for seed in seeds}) == 5


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_stream_has_the_chosen_dtype(in_fp32, joined, join):
    join(joined)
    layer = _made("transformer").float()
    x = torch.randn(LAYOUT.rows, WIDTH)
    assert residual.residual_stream(x, in_fp32=in_fp32) is x
    with torch.autocast("cpu", torch.bfloat16):
        stream = residual.residual_stream(x.bfloat16(), in_fp32=in_fp32)
        expected = torch.float32 if in_fp32 else torch.bfloat16
        assert stream.dtype == expected
        assert layer(stream, LAYOUT).dtype == expected


def test_a_compiled_layer_is_one_graph(join):
    join(True)
    torch._dynamo.reset()
    layer = _made("transformer", dropout=True)
    call = lambda x, *seeds: layer(x, LAYOUT, seeds=seeds)
    run = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(LAYOUT.rows, WIDTH, dtype=torch.float64, requires_grad=True)
    # With the seeds of its stack it drops what it drops in eager mode.
    for seed in draw_seeds(2, x.device):
        y, expected = run(x, seed), call(x, seed)
        torch.testing.assert_close(y, expected)
        (gradient,) = torch.autograd.grad(y[: LAYOUT.total].sum(), x)
        (of_eager,) = torch.autograd.grad(expected[: LAYOUT.total].sum(), x)
        torch.testing.assert_close(gradient, of_eager)
    layer.eval()
    torch.testing.assert_close(run(x), layer(x, LAYOUT))


NOISE = {"residual_dropout": 0.1, "activation_dropout": 0.1, "attention_dropout": 0.1}


def text_batch():
    examples = [TextExample(str(n), [4, 5, 6 + n], [2, 3], [7, 8]) for n in range(4)]
    return collate_text(examples, StaticShape(30, 30, 6), eos_id=1, pad_id=0)


def make_model(every):
    """With every kind of randomness, and with statistics."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=3, heads=2, feed_forward=16, subsampling_channels=4,
            input_dropout=0.1, position_dropout=0.1, **NOISE,
        ),
        decoder=DecoderConfig(width=16, layers=2, heads=2, feed_forward=16, **NOISE),
        text_encoder=TextEncoderConfig(layers=2, heads=2, feed_forward=16, **NOISE),
        ctc=True,
    )  # fmt: skip
    model = ASRModel(config, VOCABULARY).train()
    if every:
        apply_activation_checkpointing(model, every)
    return model


def results(every):
    """Losses, gradients and buffers of batches of speech and of text; and what each kept."""
    model, result, selected = make_model(every), [], []
    for seed, batch in enumerate([make_batch(0), text_batch(), make_batch(1)]):
        model.zero_grad()
        torch.manual_seed(seed)
        with counting() as bytes_of:
            losses = model(batch, label_smoothing=0.1, guided_sigma=0.3)
        selected.append(sum(bytes_of.values()))
        parts = losses.cross_entropy, losses.ctc, losses.guided
        torch.stack([part for part in parts if part is not None]).sum().backward()
        # What comes after must not see that anything was computed in between.
        result += [losses.cross_entropy.detach(), torch.rand(())]
        result += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        result += [buffer.clone() for buffer in model.buffers()]
    return result, selected


@contextmanager
def counting():
    """The bytes that autograd keeps, by where they are, so that none counts twice."""
    result: dict[int, int] = {}
    tensors = []

    def pack(x):
        storage = x.untyped_storage()
        result[storage.data_ptr()] = storage.nbytes()
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield result


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_and_statistics_are_bitwise_the_same(every):
    expected, _ = results(0)
    result, _ = results(every)
    assert len(result) == len(expected)
    for number, (x, y) in enumerate(zip(result, expected, strict=True)):
        assert torch.equal(x, y), number


def test_less_is_kept_the_more_layers_are_computed_again():
    # Weights count as well, which are small here.
    everything, some, least = (results(each_item)[1] for each_item in (0, 2, 1))
    for whole, middle, remainder in zip(everything, some, least, strict=True):
        assert remainder < middle < whole
    speech = 0
    assert least[speech] < 0.6 * everything[speech]


def test_the_first_layer_of_every_n_is_computed_again():
    model = make_model(2)
    assert [layer.is_checkpointed for layer in model.encoder.layers] == [True, False, True]
    assert [layer.is_checkpointed for layer in model.decoder.layers] == [True, False]


def test_nothing_is_computed_again_where_nothing_was_kept():
    model, calls = make_model(1), []
    model.encoder.layers[0].norm_conv.register_forward_hook(
        lambda *_: calls.append(is_recomputing())
    )
    with torch.no_grad():
        model(make_batch(0))
    assert calls == [False]
    model(make_batch(0)).cross_entropy.backward()
    assert calls == [False, False, True]
    assert not is_recomputing()
