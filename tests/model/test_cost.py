"""FLOPs by formulas and by hand, and those that torch counts: of forwards and of steps."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model, recomputed_costs, text_cost_model
from effasr.model.learning_cost import learning_cost, learning_text_cost, unreached_layers
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.experts import ExpertsConfig
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.parameters import freeze
from effasr.nn.stack import apply_activation_checkpointing
from effasr_kernels import Context

VOCABULARY = 40
CONTEXT = Context(4, 0, 3)
CONTEXTS = {"one": (CONTEXT,), "equal": (CONTEXT, CONTEXT), "right": (Context(2, 1, 1),)}
STATELESS = TransducerConfig(predictor="stateless", width=12, joint=10)
LSTM = TransducerConfig(width=12, layers=2, joint=10, durations=(0, 1, 2))


@pytest.mark.parametrize("transducer", [None, STATELESS, LSTM], ids=["none", "stateless", "lstm"])
@pytest.mark.parametrize("position", ["relative", "rotary", *CONTEXTS])
@pytest.mark.parametrize("decoder", [True, False])
def test_the_factors_are_what_torch_counts(
    transducer, position, decoder, tiny_config, examples, make_batch
):
    contexts = CONTEXTS.get(position, ())
    encoder = {"context": contexts, "position": "rotary" if contexts else position}
    config = dataclasses.replace(
        tiny_config,
        encoder=dataclasses.replace(tiny_config.encoder, **encoder),
        decoder=tiny_config.decoder if decoder else None,
        transducer=transducer,
    )
    model = ASRModel(config, VOCABULARY).eval()
    predicted, counted = [], []
    for example in examples:
        # More prompt would count as text; a translation has none for CTC and transducer.
        batch = make_batch([dataclasses.replace(example, prompt=[7], monotonic=True)])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
        predicted.append(int(cost_model(config, VOCABULARY).of(*lengths)[0]))
        counted.append(counter.get_total_flops() - _table(model, batch) - _spare_row(transducer))
    assert predicted == counted


def _table(model, batch):
    """Of the projection of relative positions, which does not depend on lengths."""
    encoder = model.encoder
    if encoder.config.position != "relative":
        return 0
    embeddings = encoder._embeddings(batch.frames, torch.float32)
    return encoder.config.layers * 2 * len(embeddings) * encoder.config.width**2


def _spare_row(transducer):
    """Of the row by which a lane is longer than the sequences that an LSTM reads in it."""
    if transducer is None or transducer.predictor != "lstm":
        return 0
    return transducer.layers * 16 * transducer.width**2


def test_the_default_of_planning_is_the_preset():
    name = "canary_180m_flash"
    assert cost_model(PRESETS[name], PRESET_VOCABULARIES[name]) == CANARY_180M_FLASH


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("every", "shared"), [(1, 0), (2, 0), (2, 2)])
def test_what_is_computed_again_is_what_torch_counts(
    every, shared, dropout, tiny_config, examples, make_batch
):
    rotary = dataclasses.replace(tiny_config.encoder, position="rotary", layers=3)
    decoder = dataclasses.replace(tiny_config.decoder, residual_dropout=dropout)
    text = TextEncoderConfig(layers=3, heads=4, feed_forward=40, residual_dropout=dropout)
    text = dataclasses.replace(text, shared_layers=shared)
    config = dataclasses.replace(tiny_config, encoder=rotary, decoder=decoder, text_encoder=text)
    shape = StaticShape(9, 10, 1)
    pair = collate_text([TextExample("pair", [4] * 9, [7], [8] * 9)], shape, eos_id=3, pad_id=2)
    for batch in (make_batch(examples[:1]), pair):
        model = ASRModel(config, VOCABULARY)
        counted = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                model(batch).cross_entropy.backward()
            counted.append(counter.get_total_flops())
            apply_activation_checkpointing(model, every)
        speech, text_pair = recomputed_costs(config, VOCABULARY, every)
        cost = speech if batch.source is None else text_pair
        lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
        assert counted[1] - counted[0] == cost.of(*lengths)[0]


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


@pytest.fixture
def config(tiny_config):
    """Of rotary positions, without a table; wide enough for the first layers to weigh little."""
    encoder = replace(tiny_config.encoder, position="rotary", layers=3, width=32, feed_forward=64)
    transducer = TransducerConfig(predictor="stateless", width=12, joint=10)
    return replace(tiny_config, encoder=encoder, transducer=transducer)


def counted(model, batch):
    with FlopCounterMode(display=False) as counter:
        losses = model(batch)
        (losses.cross_entropy + losses.ctc + losses.transducer).backward()
    return counter.get_total_flops()


def predicted(model, batch):
    cost, whole = learning_cost(model), 0
    for frames, tokens in zip(batch.frames.lengths, batch.tokens.layout.lengths, strict=True):
        whole += 3 * int(cost.of(np.array([frames]), np.array([tokens]))[0])
    features = model.config.features
    mel = 2 * features.rows_per_frame * (features.n_fft // 2 + 1) * features.mel_bins
    # Where the backward comes to the convolutions, features count as if they learnt.
    learns = any(p.requires_grad for p in model.encoder.subsampling.parameters())
    return whole - 2 * mel * sum(batch.frames.lengths) * learns


@pytest.fixture
def batch(examples, make_batch):
    # More prompt would count as text; a translation has none for CTC and transducer.
    return make_batch([replace(example, prompt=[7], monotonic=True) for example in examples])


@pytest.mark.parametrize(
    "frozen",
    [
        ["encoder"],
        ["encoder.subsampling", "encoder.layers.[01]"],
        ["decoder", "encoder"],
        ["encoder", "decoder.layers.0", "decoder.embed*", "projection"],
        ["encoder.layers.1", "decoder.layers.*.mlp"],
        ["ctc_head", "transducer"],
        ["*norm*", "decoder.embed_tokens"],
    ],
    ids=" ".join,
)
def test_what_is_frozen_saves_what_torch_counts(config, batch, frozen):
    model = ASRModel(config, VOCABULARY).eval()
    full = counted(model, batch)
    model.zero_grad()
    freeze(model, frozen)
    part = counted(model, batch)
    assert part < full
    # Operations with a loss compute all of their gradients, needed or not.
    assert predicted(model, batch) == pytest.approx(part, rel=0.02)


@pytest.mark.parametrize("rank", [1, 16])
def test_adapters_cost_what_torch_counts(config, batch, rank):
    model = ASRModel(config, VOCABULARY).eval()
    adapt(model, LoRAConfig(rank=rank))
    assert predicted(model, batch) == pytest.approx(counted(model, batch), rel=0.02)


def test_adapters_of_experts_cost_what_torch_counts(config, batch):
    """Of two ranks the difference, as torch counts gradients of frozen experts as computed."""
    experts = ExpertsConfig(count=3, top_k=2)
    decoder = replace(config.decoder, experts=experts)
    encoder = replace(config.encoder, experts=experts)
    config = replace(config, encoder=encoder, decoder=decoder)
    costs = []
    for rank in (1, 9):
        model = ASRModel(config, VOCABULARY).eval()
        adapt(model, LoRAConfig(rank=rank))
        costs.append((predicted(model, batch), counted(model, batch)))
    (less, less_counted), (more, more_counted) = costs
    assert more - less == pytest.approx(more_counted - less_counted, rel=0.01)


def test_a_model_that_is_trained_throughout_costs_as_ever(config):
    text = replace(config, text_encoder=TextEncoderConfig(layers=1, heads=2, feed_forward=16))
    model = ASRModel(text, VOCABULARY)
    assert learning_cost(model) == cost_model(text, VOCABULARY)
    assert learning_text_cost(model) == text_cost_model(text, VOCABULARY)
    assert learning_text_cost(ASRModel(config, VOCABULARY)) is None


def test_a_frozen_text_encoder_is_read_but_not_taught(config):
    text = replace(config, text_encoder=TextEncoderConfig(layers=2, heads=2, feed_forward=16))
    model = ASRModel(text, VOCABULARY)
    freeze(model, ["text_encoder", "projection"])
    full, part = text_cost_model(text, VOCABULARY), learning_text_cost(model)
    # Forward alone, of three parts.
    assert part.frame_pair == pytest.approx(full.frame_pair / 3)
    # Of what frames cost, the keys and values of the decoder are taught.
    parameters = dict(model.named_parameters())
    keys_values = sum(2 * p.numel() for x, p in parameters.items() if x.endswith(".kv_proj.weight"))
    assert 3 * part.frame == pytest.approx(full.frame + keys_values)
    assert (part.token, part.token_frame) == (full.token, full.token_frame)


@pytest.mark.parametrize("frozen", [["text_encoder"], ["encoder"], ["decoder.layers"]])
def test_shared_layers_cost_what_torch_counts(config, frozen):
    encoder = replace(config.encoder, position="rotary")
    text = TextEncoderConfig(layers=2, heads=2, feed_forward=16, shared_layers=2, upsample=2)
    model = ASRModel(replace(config, encoder=encoder, text_encoder=text), VOCABULARY).eval()
    freeze(model, frozen)
    example, shape = TextExample("pair", [4] * 90, [7], [8] * 20), StaticShape(90, 30, 1)
    batch = collate_text([example], shape, eos_id=3, pad_id=2, aligned=True)
    lengths = np.array([90]), np.array([21])
    cost = 3 * int(learning_text_cost(model).of(*lengths)[0])
    assert cost == pytest.approx(counted(model, batch), rel=0.02)
    assert cost < 3 * int(text_cost_model(model.config, VOCABULARY).of(*lengths)[0])


def test_layers_that_the_backward_does_not_reach_are_not_computed_again(config, batch):
    model = ASRModel(config, VOCABULARY).eval()
    assert unreached_layers(model) == 0
    freeze(model, ["encoder.layers.0"])
    assert unreached_layers(model) == 0
    freeze(model, ["encoder.subsampling"])
    assert unreached_layers(model) == 1
    plain = counted(model, batch)
    model.zero_grad()
    apply_activation_checkpointing(model, 1)
    more = counted(model, batch) - plain
    cost, _ = recomputed_costs(config, VOCABULARY, 1, unreached_layers(model))
    sizes = np.array(batch.frames.lengths), np.array(batch.tokens.layout.lengths)
    assert cost.of(*sizes).sum() == more
    freeze(model, ["encoder"])
    assert unreached_layers(model) == 3
