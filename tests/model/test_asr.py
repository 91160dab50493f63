import dataclasses

import pytest
import torch
import torch.nn.functional as F

from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig

VOCABULARY = 40
ENCODERS = {
    "canary": {},
    "small": {"conv_norm": "layer_norm", "subsampling_norm": True, "input_positions": 0.3},
    "rotary": {"position": "rotary", "scale_input": True},
    "no positions": {"position": "none", "input_positions": 1.0},
    "no biases": {"bias": False, "convolution_bias": False},
    "fixed reach": {"max_frames": 100},
}
HEADS = {
    "lstm": TransducerConfig(width=12, layers=2, joint=10),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=10, activation="tanh"),
    "fastemit": TransducerConfig(predictor="stateless", width=12, joint=10, fastemit=0.1),
    "durations": TransducerConfig(width=12, joint=10, durations=(0, 1, 2, 4), sigma=0.05),
}
OUTPUTS = {"": (False, False), " with ctc": (False, True), " with all": (True, True)}
LOSSES = "cross_entropy", "ctc", "transducer", "guided"
OPTIONS = {"label_smoothing": 0.1, "guided_sigma": 0.3}


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


def configure(config, kind):
    """The encoders have a decoder and CTC; the transducers what their names say."""
    if kind in ENCODERS:
        return dataclasses.replace(
            config, encoder=dataclasses.replace(config.encoder, **ENCODERS[kind])
        )
    head, _, outputs = kind.partition(" ")
    decoder, ctc = OUTPUTS[f" {outputs}" if outputs else ""]
    return dataclasses.replace(
        config, transducer=HEADS[head], ctc=ctc, decoder=config.decoder if decoder else None
    )


def make(config, kind):
    torch.manual_seed(0)
    return ASRModel(configure(config, kind), VOCABULARY)


def total(losses):
    return sum(getattr(losses, name) for name in LOSSES)


@pytest.mark.parametrize("kind", [*ENCODERS, *(h + o for h in HEADS for o in OUTPUTS)])
def test_a_static_pack_is_the_sum_of_its_utterances(kind, tiny_config, examples, make_batch):
    model = make(tiny_config, kind).double().eval()
    packed = model(make_batch(examples, static=True), **OPTIONS)
    total(packed).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = [model(make_batch([example]), **OPTIONS) for example in examples]
    for name in LOSSES:
        expected = torch.stack([getattr(losses, name) for losses in alone]).sum()
        torch.testing.assert_close(getattr(packed, name), expected)
    # The translation has no loss of a transducer or CTC.
    assert (alone[2].per_utterance == 0).all() == (model.decoder is None)
    each = torch.cat([losses.per_utterance for losses in alone] + [torch.zeros(2)])
    torch.testing.assert_close(packed.per_utterance, each)
    torch.stack([total(losses) for losses in alone]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["canary", "lstm"])
def test_nan_is_not_hidden_and_is_named(kind, tiny_config, examples, make_batch):
    audio = examples[1].audio.copy()
    audio[100] = float("nan")
    broken = [examples[0], dataclasses.replace(examples[1], audio=audio), examples[2]]
    losses = make(tiny_config, kind).eval()(make_batch(broken, static=True))
    for name in ("transducer",) if kind == "lstm" else ("cross_entropy", "ctc"):
        assert getattr(losses, name).isnan()
    assert losses.per_utterance.isnan().tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("kind", ["canary", *HEADS])
@pytest.mark.parametrize("static", [True, False], ids=["tails", "no sequence"])
def test_a_batch_of_nothing_costs_nothing_but_reaches_every_parameter(
    kind, static, tiny_config, make_batch
):
    model = make(tiny_config, kind).train()
    losses = model(make_batch([], static=static), **OPTIONS)
    assert total(losses) == 0
    total(losses).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("kind", ["canary", *HEADS])
def test_autocast_keeps_losses_in_float32_and_near(kind, tiny_config, examples, make_batch):
    batch, model = make_batch(examples, static=True), make(tiny_config, kind).train()
    exact = model(batch, guided_sigma=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(batch, guided_sigma=0.3)
        if model.ctc_head is not None:
            assert model.ctc_logits(model.encode(batch).values).dtype == torch.bfloat16
    for name in (*LOSSES, "per_utterance"):
        value = getattr(losses, name)
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(value, getattr(exact, name), rtol=0.05, atol=0.5)
    total(losses).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", ["canary", *(f"{head} with ctc" for head in HEADS)])
def test_from_state_dict_is_the_same_model(kind, tiny_config, examples, make_batch):
    model, batch = make(tiny_config, kind).eval(), make_batch(examples)
    state = model.state_dict()
    again = ASRModel.from_state_dict(model.config, VOCABULARY, state).eval()
    assert torch.equal(again(batch).per_utterance, model(batch).per_utterance)
    assert all(parameter.requires_grad for parameter in again.parameters())
    # Without a copy: the same memory.
    assert again.ctc_head.weight.data_ptr() == model.ctc_head.weight.data_ptr()
    del state["ctc_head.bias"]
    with pytest.raises(RuntimeError, match=r"ctc_head\.bias"):
        ASRModel.from_state_dict(model.config, VOCABULARY, state)


@pytest.mark.parametrize("kind", ["canary", *(f"{head} with ctc" for head in HEADS)])
def test_an_empty_shell_can_be_reset(kind, tiny_config):
    expected = make(tiny_config, kind)
    with torch.device("meta"):
        model = ASRModel(expected.config, VOCABULARY)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    model.reset_parameters()
    for name, value in expected.state_dict().items():
        reset = model.state_dict()[name]
        assert reset.shape == value.shape
        assert not (reset == 7).any(), name
        if value.numel() >= 50:
            assert abs(reset.std() - value.std()) < 0.15, name
    assert torch.equal(model.features.filterbank, expected.features.filterbank)


def test_losses_count_what_they_should(tiny_model, examples, make_batch):
    batch = make_batch(examples)
    losses = tiny_model(batch, guided_sigma=0.3)
    encoded = tiny_model.encode(batch)
    hidden, penalty = tiny_model.decode(batch.tokens, encoded, guided_sigma=0.3)
    rows = F.cross_entropy(tiny_model.logits(hidden), batch.targets, reduction="none")
    torch.testing.assert_close(losses.cross_entropy, rows.sum())

    # "translated" is not monotonic; "crowded" needs more frames than it has.
    guided = []
    for n in (0, 1, 3):
        begin, end = batch.tokens.layout.cu_seqlens_host[n : n + 2]
        guided.append(penalty[begin + 2 : end].sum())
    torch.testing.assert_close(losses.guided, torch.stack(guided).sum())

    scores = tiny_model.ctc_logits(encoded.values).log_softmax(-1).split(batch.frames.lengths)
    expected = torch.stack(
        [
            F.ctc_loss(
                scores[n][:, None],
                torch.tensor([examples[n].text]),
                [len(scores[n])],
                [len(examples[n].text)],
                blank=VOCABULARY,
                reduction="sum",
            )
            for n in (0, 1)
        ]
    ).sum()
    torch.testing.assert_close(losses.ctc, expected)
    torch.testing.assert_close(losses.per_utterance.sum(), total(losses))
    assert not losses.per_utterance.requires_grad


def test_augmentation_is_for_training_only(tiny_model, examples, make_batch):
    augment = SpecAugmentConfig(freq_masks=2, freq_width=8)
    tiny_model.config = dataclasses.replace(tiny_model.config, spec_augment=augment)
    batch = make_batch(examples)
    quiet = tiny_model.encode(batch).values
    assert torch.equal(tiny_model.encode(batch).values, quiet)
    tiny_model.train()
    assert not torch.equal(tiny_model.encode(batch).values, tiny_model.encode(batch).values)
    # Masks that have not begun are empty, and draw as many numbers.
    results, drawn = [], []
    for on in (False, True):
        tiny_model.masks_on = torch.tensor(on)
        torch.manual_seed(0)
        results.append(tiny_model.encode(batch).values)
        drawn.append(torch.rand(1))
    tiny_model.config = dataclasses.replace(tiny_model.config, spec_augment=SpecAugmentConfig())
    plain = tiny_model.encode(batch).values
    assert [torch.equal(result, plain) for result in results] == [True, False]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("head", ["lstm", "stateless"])
def test_the_loss_is_that_of_the_scores(head, tiny_config, examples, make_batch):
    """Against the forward recursion over the scores that decoding sees."""
    model = make(tiny_config, head).double().eval()
    transducer = model.transducer
    batch = make_batch(examples[:1])
    with torch.no_grad():
        frames = transducer.encoder_projection(model.encode(batch).values)
        predicted, state = transducer.begin(1)
        columns = [transducer.logits(frames, predicted).log_softmax(-1)]
        for label in batch.text.values:
            predicted, state = transducer.step(label[None], state)
            columns.append(transducer.logits(frames, predicted).log_softmax(-1))
    alpha = torch.zeros(len(frames), len(columns), dtype=torch.float64)
    for t in range(len(frames)):
        for u, scores in enumerate(columns):
            ways = []
            if t:
                ways.append(alpha[t - 1, u] + scores[t - 1, VOCABULARY])
            if u:
                ways.append(alpha[t, u - 1] + columns[u - 1][t, batch.text.values[u - 1]])
            if ways:
                alpha[t, u] = torch.stack(ways).logsumexp(0)
    expected = -(alpha[-1, -1] + columns[-1][-1, VOCABULARY])
    torch.testing.assert_close(model(batch).transducer, expected)


@pytest.mark.parametrize("head", ["lstm", "stateless"])
def test_a_crowded_utterance_fits_and_a_translation_does_not_count(
    head, tiny_config, examples, make_batch
):
    model = make(tiny_config, f"{head} with ctc").eval()
    crowded = model(make_batch([examples[3]]))
    assert crowded.ctc == 0
    assert 0 < crowded.transducer < torch.inf
    translated = model(make_batch([examples[2]]))
    translated.transducer.backward()
    assert translated.transducer == 0
    assert not model.transducer.output.weight.grad.any()
