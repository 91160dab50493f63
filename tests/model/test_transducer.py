import dataclasses

import pytest
import torch

from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig

VOCABULARY = 40
HEADS = {
    "lstm": TransducerConfig(width=12, layers=2, joint=10),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=10, activation="tanh"),
    "fastemit": TransducerConfig(predictor="stateless", width=12, joint=10, fastemit=0.1),
    "durations": TransducerConfig(width=12, joint=10, durations=(0, 1, 2, 4), sigma=0.05),
}
OUTPUTS = {"alone": (False, False), "with ctc": (False, True), "with all": (True, True)}


def configure(config, head, outputs="alone"):
    decoder, ctc = OUTPUTS[outputs]
    return dataclasses.replace(
        config, transducer=HEADS[head], ctc=ctc, decoder=config.decoder if decoder else None
    )


def make(config):
    torch.manual_seed(0)
    return ASRModel(config, VOCABULARY)


def total(losses):
    return losses.cross_entropy + losses.ctc + losses.transducer + losses.guided


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("head", HEADS)
def test_a_static_pack_is_the_sum_of_its_utterances(
    head, outputs, tiny_config, examples, make_batch
):
    model = make(configure(tiny_config, head, outputs)).double().eval()
    packed = model(make_batch(examples, static=True))
    total(packed).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = [model(make_batch([example])) for example in examples]
    expected = torch.stack([losses.transducer for losses in alone]).sum()
    torch.testing.assert_close(packed.transducer, expected)
    # The translation has no loss of its own here, unless there is a decoder.
    assert (alone[2].per_utterance == 0).all() == (outputs != "with all")
    each = torch.cat([losses.per_utterance for losses in alone] + [torch.zeros(2)])
    torch.testing.assert_close(packed.per_utterance, each)
    total_alone = torch.stack([total(losses) for losses in alone]).sum()
    total_alone.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("head", ["lstm", "stateless"])
def test_the_loss_is_that_of_the_scores(head, tiny_config, examples, make_batch):
    """Against the forward recursion over the scores that decoding sees."""
    model = make(configure(tiny_config, head)).double().eval()
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
    model = make(configure(tiny_config, head, "with ctc")).eval()
    crowded = model(make_batch([examples[3]]))
    assert crowded.ctc == 0
    assert 0 < crowded.transducer < torch.inf
    translated = model(make_batch([examples[2]]))
    translated.transducer.backward()
    assert translated.transducer == 0
    assert not model.transducer.output.weight.grad.any()


def test_without_a_frame_there_is_no_loss(tiny_config, examples, make_batch):
    model = make(configure(tiny_config, "lstm")).eval()
    silent = dataclasses.replace(examples[0], audio=examples[0].audio[:0])
    losses = model(make_batch([silent, examples[1]]))
    assert losses.per_utterance[0] == 0
    losses.transducer.backward()
    assert losses.transducer.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_nan_is_named(tiny_config, examples, make_batch):
    audio = examples[1].audio.copy()
    audio[100] = float("nan")
    broken = [examples[0], dataclasses.replace(examples[1], audio=audio)]
    model = make(configure(tiny_config, "lstm")).eval()
    losses = model(make_batch(broken, static=True))
    assert losses.transducer.isnan()
    assert losses.per_utterance.isnan().tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("static", [True, False], ids=["tails", "no sequence"])
def test_a_batch_of_nothing_reaches_every_parameter(head, static, tiny_config, make_batch):
    model = make(configure(tiny_config, head)).train()
    losses = model(make_batch([], static=static))
    total(losses).backward()
    assert total(losses) == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_dropout_is_for_training_and_reproducible(tiny_config, examples, make_batch):
    batch = make_batch(examples, static=True)
    for head in ("lstm", "stateless"):
        config = dataclasses.replace(
            tiny_config,
            decoder=None,
            transducer=dataclasses.replace(HEADS[head], dropout=0.5),
            encoder=dataclasses.replace(tiny_config.encoder, conv_norm="layer_norm"),
        )
        model = make(config)
        seen = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            seen.append(model(batch).transducer.item())
        assert seen[0] == seen[1] != seen[2]
        model.eval()
        assert model(batch).transducer == model(batch).transducer


@pytest.mark.parametrize("head", HEADS)
def test_autocast_is_near(head, tiny_config, examples, make_batch):
    model = make(configure(tiny_config, head)).train()
    batch = make_batch(examples, static=True)
    exact = model(batch).transducer
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(batch)
    assert losses.transducer.dtype == torch.float32
    torch.testing.assert_close(losses.transducer, exact, rtol=0.05, atol=0.5)
    losses.transducer.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("head", ["lstm", "stateless", "durations"])
@pytest.mark.representative(head="durations")
def test_a_few_steps_learn_the_batch(head, tiny_config, examples, make_batch):
    config = configure(tiny_config, head)
    small = dataclasses.replace(
        config.encoder, conv_norm="layer_norm", subsampling_norm=True, input_positions=0.3
    )
    wide = dataclasses.replace(HEADS[head], width=32, joint=32)
    model = make(dataclasses.replace(config, encoder=small, transducer=wide))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = make_batch(examples, static=True)
    history = []
    for _ in range(60):
        loss = model(batch).transducer / batch.num_monotonic_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.2 * history[0]


@pytest.mark.parametrize("head", HEADS)
def test_shells_and_state_dicts(head, tiny_config):
    config = configure(tiny_config, head, "with ctc")
    expected = make(config)
    again = ASRModel.from_state_dict(config, VOCABULARY, expected.state_dict())
    assert torch.equal(again.transducer.output.weight, expected.transducer.output.weight)
    with torch.device("meta"):
        shell = ASRModel(config, VOCABULARY)
    shell.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*shell.parameters(), *shell.buffers()]:
            tensor.fill_(7)
    shell.reset_parameters()
    for name, value in expected.state_dict().items():
        found = shell.state_dict()[name]
        assert not (found == 7).any(), name
        if value.numel() >= 50:
            assert abs(found.std() - value.std()) < 0.15, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictor": "gru"}, "`predictor` must be one of lstm, stateless, but is 'gru'"),
        ({"activation": "gelu"}, "`activation` must be one of relu, tanh"),
        ({"width": 0}, "`width` must be at least 1"),
        ({"layers": 0}, "`layers` must be at least 1"),
        ({"context": 0}, "`context` must be at least 1"),
        ({"joint": 0}, "`joint` must be at least 1"),
        ({"fastemit": -0.1}, "`fastemit` must be at least 0"),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        ({"durations": (1, 2)}, r"`durations` must start with 0 and 1 and increase, as \[0, 1"),
        ({"durations": (0, 1, 1)}, r"`durations` must .*, but is \[0, 1, 1\]"),
        ({"durations": (0, 1), "sigma": -0.1}, "`sigma` must be at least 0, but is -0.1"),
        ({"sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
    ],
)
def test_a_wrong_value_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TransducerConfig(**options)
