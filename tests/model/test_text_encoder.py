from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.interop.huggingface.checkpoint import export_model
from effasr.model.asr import ASRModel
from effasr.model.cost import text_cost_model
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from tests.support.small_model import check_compiled

VOCABULARY = 40
PAIRS = [
    TextExample("long", [9, 10, 11, 12, 13, 3], [7, 5, 6], [20, 21, 22, 23]),
    TextExample("short", [14, 3], [7, 5, 6], [24]),
    TextExample("middle", [15, 16, 17, 3], [7, 5, 6], [25, 26]),
]
TEXT = TextEncoderConfig(layers=2, heads=4, feed_forward=48)


def batch_of(pairs, shape=None):
    if shape is None:
        written = sum(len(pair.prompt) + len(pair.text) for pair in pairs)
        shape = StaticShape(sum(len(pair.source) for pair in pairs), written, len(pairs))
    return collate_text(pairs, shape, eos_id=3, pad_id=2)


@pytest.fixture
def config(tiny_config):
    transducer = TransducerConfig(predictor="stateless", width=16, joint=16)
    return replace(tiny_config, text_encoder=TEXT, transducer=transducer)


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    return ASRModel(config, VOCABULARY).eval()


def test_a_pair_does_not_see_the_others_nor_the_tail(model):
    together = model(batch_of(PAIRS, StaticShape(40, 50, 6)))
    assert together.cross_entropy.isfinite()
    for number, pair in enumerate(PAIRS):
        alone = model(batch_of([pair]))
        torch.testing.assert_close(together.per_utterance[number], alone.cross_entropy.detach())
    torch.testing.assert_close(together.per_utterance.sum(), together.cross_entropy.detach())


def test_every_word_of_the_source_counts(model):
    loss = model(batch_of(PAIRS)).per_utterance
    for position in range(len(PAIRS[0].source)):
        source = [*PAIRS[0].source]
        source[position] = 30
        changed = model(batch_of([replace(PAIRS[0], source=source)])).per_utterance
        assert (changed[0] - loss[0]).abs() > 1e-5
    swapped = replace(PAIRS[0], source=[10, 9, *PAIRS[0].source[2:]])
    assert (model(batch_of([swapped])).per_utterance[0] - loss[0]).abs() > 1e-5


def test_text_trains_decoder_and_text_encoder_by_cross_entropy_alone(model):
    model.train()
    losses = model(batch_of(PAIRS, StaticShape(40, 50, 6)), label_smoothing=0.1, guided_sigma=0.3)
    assert losses.ctc == losses.transducer == losses.guided == 0
    losses.cross_entropy.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    of_speech = ("encoder.", "ctc_head.", "transducer.")
    for name, gradient in gradients.items():
        # The gradient of the bias of keys is zero whatever the loss.
        if name.startswith(of_speech):
            assert not gradient.any(), name
        elif name.endswith("weight"):
            assert gradient.any(), name


def test_speech_does_not_notice_the_text_encoder(model, config, examples, make_batch):
    """Losses and gradients are the same to the last bit."""
    plain = ASRModel(replace(config, text_encoder=None), VOCABULARY)
    weights = model.state_dict()
    plain.load_state_dict({k: v for k, v in weights.items() if not k.startswith("text_encoder.")})
    batch = make_batch(examples, static=True)
    results = []
    for item in (model.train(), plain.train()):
        torch.manual_seed(1)
        losses = item(batch, guided_sigma=0.3)
        (losses.cross_entropy + losses.ctc + losses.transducer + losses.guided).backward()
        results.append((losses, {name: p.grad for name, p in item.named_parameters()}))
    (ours, gradients), (theirs, expected) = results
    for name in ("cross_entropy", "ctc", "transducer", "guided", "per_utterance"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    for name in gradients.keys() - expected.keys():
        assert name.startswith("text_encoder.")
        assert not gradients[name].any()


@pytest.mark.slow
@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.extended
def test_both_kinds_compile_once_each_and_without_a_break(config, examples, make_batch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    # The host divides the transducer's loss by lengths.
    small = replace(
        config,
        encoder=replace(config.encoder, layers=1),
        decoder=replace(config.decoder, layers=1),
        text_encoder=replace(TEXT, layers=1),
        transducer=None,
    )
    model = ASRModel(small, VOCABULARY).train()
    shape = StaticShape(40, 50, 6)
    kinds = [make_batch(examples, static=True), batch_of(PAIRS, shape)]
    again = [make_batch(examples[::-1], static=True), batch_of(PAIRS[::-1], shape)]
    check_compiled(model, [*kinds, *again], graphs=2, label_smoothing=0.1)
    torch._dynamo.reset()


def test_an_export_leaves_the_text_encoder_out(config, tmp_path, caplog):
    decoder = replace(config.decoder, width=config.encoder.width)
    export_model(ASRModel(replace(config, decoder=decoder), VOCABULARY), tmp_path / "hf")
    assert "The text encoder is not exported: transformers' Canary has none" in caplog.text


def test_the_cost_of_a_pair_is_what_torch_counts(model, config):
    cost = text_cost_model(config, VOCABULARY)
    for pair in PAIRS:
        batch = batch_of([replace(pair, prompt=[7])])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        lengths = np.array(batch.frame_lengths), np.array(batch.token_lengths)
        assert cost.of(*lengths).tolist() == [counter.get_total_flops()]
    assert text_cost_model(replace(config, text_encoder=None), VOCABULARY) is None
