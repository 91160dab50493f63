from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.distributed.batch_norm import running_statistics
from effasr.interop.huggingface.checkpoint import export_model
from effasr.model.asr import ASRModel
from effasr.model.cost import text_cost_model
from effasr.model.text_encoder import TextEncoder, TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr_kernels import PackedLayout, PackedSequence, best_alignment_loss
from tests.support.small_model import check_compiled

VOCABULARY = 40
PAIRS = [
    TextExample("long", [9, 10, 11, 12, 13, 3], [7, 5, 6], [20, 21, 22, 23]),
    TextExample("short", [14, 3], [7, 5, 6], [24]),
    TextExample("middle", [15, 16, 17, 3], [7, 5, 6], [25, 26]),
]
TEXT = TextEncoderConfig(layers=2, heads=4, feed_forward=48)


SHARED = replace(TEXT, shared_layers=1, upsample=3)


def batch_of(pairs, shape=None, **options):
    if shape is None:
        written = sum(len(pair.prompt) + len(pair.text) for pair in pairs)
        shape = StaticShape(sum(len(pair.source) for pair in pairs), written, len(pairs))
    return collate_text(pairs, shape, eos_id=3, pad_id=2, **options)


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


@pytest.mark.parametrize("conv_norm", ["batch_norm", "layer_norm"])
def test_ctc_and_transducer_learn_from_texts_through_shared_layers(config, conv_norm):
    """In a static shape as of each text alone; nothing below the shared layers learns."""
    torch.manual_seed(0)
    encoder = replace(config.encoder, conv_norm=conv_norm)
    shared = replace(config, text_encoder=SHARED, encoder=encoder)
    model = ASRModel(shared, VOCABULARY).double().eval()
    losses = model(batch_of(PAIRS, StaticShape(40, 50, 6), aligned=True))
    batches = [batch_of([pair], aligned=True) for pair in PAIRS]
    alone = [model(batch) for batch in batches]
    for name in ("cross_entropy", "ctc", "transducer"):
        parts = torch.stack([getattr(item, name) for item in alone])
        assert (parts > 0).all()
        torch.testing.assert_close(getattr(losses, name), parts.sum())
    # The heads write what the text encoder reads, but its end.
    assert [x.text.values.tolist()[:-1] for x in batches] == [pair.source[:-1] for pair in PAIRS]
    (losses.ctc + losses.transducer + 0 * losses.cross_entropy).backward()
    last = f"encoder.layers.{config.encoder.layers - 1}."
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(("text_encoder", "ctc_head", "transducer", last)):
            has_gradient = parameter.grad.any() or not name.endswith("weight")
            assert has_gradient, name
        elif name.startswith("encoder."):
            assert not parameter.grad.any(), name


def test_masked_tokens_are_not_seen_in_training(config):
    masked = replace(config, text_encoder=replace(SHARED, mask=0.5), ctc=True)
    model = ASRModel(masked, VOCABULARY)
    read = PackedSequence(torch.ones(40, 4), PackedLayout.from_lengths([40]))
    tokens = torch.zeros(40, dtype=torch.int64)
    hidden = (model.text_encoder.upsampled(read, tokens).values.view(40, 3, 4) == 0).all(2)
    assert (hidden.all(1) == hidden.any(1)).all()
    assert 5 < hidden[:, 0].sum() < 35
    assert model.eval().text_encoder.upsampled(read, tokens).values.all()


LEARNT = replace(SHARED, durations="learnt")


def test_durations_are_learnt_from_the_lengths_of_utterances():
    """Exactly where lengths are sums; silence is shared, and a token that is not heard stays."""
    model, random = TextEncoder(LEARNT, 16, VOCABULARY).train(), np.random.default_rng(0)
    before = model.running_duration.clone()
    known = torch.tensor([1.0, 2, 3, 5, 8, 9])
    for step in range(400):
        texts = [random.integers(0, 6, size=random.integers(0, 9)) for _ in range(4)]
        lengths = [0 if step % 2 and not n else int(known[x].sum()) for n, x in enumerate(texts)]
        texts = [x[:0] if not length else x for x, length in zip(texts, lengths, strict=True)]
        layout = PackedLayout.from_lengths(list(map(len, texts)), rows=40)
        ids = torch.tensor(
            np.concatenate([*texts, np.full(40 - layout.total, 7)]), dtype=torch.int64
        )
        model.learn_durations(PackedSequence(ids, layout), PackedLayout.from_lengths(lengths))
    assert model.running_duration in running_statistics(model)
    torch.testing.assert_close(model.running_duration[:6], known, rtol=0.01, atol=0.01)
    assert torch.equal(model.running_duration[6:], before[6:])
    learnt = model.running_duration.clone()
    model.eval().learn_durations(PackedSequence(ids, layout), PackedLayout.from_lengths(lengths))
    assert torch.equal(model.running_duration, learnt)


def test_long_tokens_have_more_of_as_many_rows():
    torch.manual_seed(0)
    model = TextEncoder(LEARNT, 16, VOCABULARY).double().eval()
    layout = PackedLayout.from_lengths([2, 0, 4, 1], rows=10)
    tokens = torch.tensor([4, 5, 5, 4, 6, 7, 5, 0, 0, 0])
    values = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    read = PackedSequence(values, layout)
    # All are the same at first.
    fixed = values.repeat_interleave(3, 0)
    assert torch.equal(model.upsampled(read, tokens).values, fixed)
    # 2 to 1 in 6 rows; 1 to 2 to 6.3 to 0.01 in 12, and each has one; all 3 where it is alone.
    model.running_duration[4:8] = torch.tensor([2.0, 1.0, 6.3, 0.01])
    rows = model.upsampled(read, tokens)
    expected = values.repeat_interleave(torch.tensor([4, 2, 1, 3, 7, 1, 3, 3, 3, 3]), 0)
    assert rows.layout.cu_seqlens.tolist() == [0, 6, 6, 18, 21]
    assert torch.equal(rows.values, expected)
    gradient = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(x, values, gradient)[0] for x in (rows.values, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("text", [TEXT, SHARED], ids=["none shared", "one shared"])
def test_consistency_is_the_distance_of_transcripts_before_the_shared_layers(
    text, config, examples, make_batch
):
    torch.manual_seed(0)
    model = ASRModel(replace(config, text_encoder=text), VOCABULARY).double().eval()
    batch, speech = make_batch(examples, static=True), []
    layers = model.encoder.layers[: len(model.encoder.layers) - text.shared_layers]
    handle = layers[-1].register_forward_hook(lambda _, inputs, x: speech.append(x))
    plain, losses = model(batch), model(batch, consistency=True)
    handle.remove()
    assert plain.consistency == 0
    torch.testing.assert_close(losses.ctc, plain.ctc)
    distances = best_alignment_loss(
        speech[-1], model.text_encoder(batch.text).values, batch.frames, batch.text.layout
    )
    targets = [0 if not example.monotonic else len(example.text) + 1 for example in examples]
    expected = sum(n * distances[i] for i, n in enumerate(targets) if n)
    torch.testing.assert_close(losses.consistency, expected)
    losses.consistency.backward()
    for name in ("text_encoder.embed_tokens.weight", "encoder.layers.0.norm_out.weight"):
        assert model.get_parameter(name).grad.any(), name


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
        text_encoder=replace(LEARNT, layers=1),
        transducer=None,
    )
    model = ASRModel(small, VOCABULARY).train()
    shape = StaticShape(40, 50, 6)
    kinds, again = (
        [make_batch(x, static=True), batch_of(y, shape, aligned=True)]
        for x, y in ((examples, PAIRS), (examples[::-1], PAIRS[::-1]))
    )
    check_compiled(model, [*kinds, *again], graphs=2, label_smoothing=0.1)
    torch._dynamo.reset()


def test_an_export_leaves_the_text_encoder_out(config, tmp_path, caplog):
    decoder = replace(config.decoder, width=config.encoder.width)
    export_model(ASRModel(replace(config, decoder=decoder), VOCABULARY), tmp_path / "hf")
    assert "The text encoder is not exported: transformers' Canary has none" in caplog.text


@pytest.mark.parametrize("text", [TEXT, SHARED], ids=["none shared", "one shared"])
def test_the_cost_of_a_pair_is_what_torch_counts(text, config):
    encoder = replace(config.encoder, position="rotary")
    config = replace(config, text_encoder=text, encoder=encoder)
    model, cost = ASRModel(config, VOCABULARY), text_cost_model(config, VOCABULARY)
    for pair in PAIRS:
        batch = batch_of([replace(pair, prompt=[7])], aligned=text.shared_layers > 0)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        lengths = np.array(batch.frame_lengths), np.array(batch.token_lengths)
        # The end of the source is no label: its row is a tail, which torch counts.
        tail = 2 * 16 * 16 * text.shared_layers
        assert cost.of(*lengths).tolist() == [counter.get_total_flops() - tail]
    assert text_cost_model(replace(config, text_encoder=None), VOCABULARY) is None
