"""The model over padded batches is the model over packed ones."""

import dataclasses

import pytest
import torch

from effasr.interop.onnx.plain_model import (
    JointStep,
    PaddedEncoder,
    in_model_layout,
    predictor_step,
)
from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig
from tests.support.small_model import VOCABULARY, shake

LSTM = TransducerConfig(width=12, layers=2, joint=10)


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


@pytest.mark.parametrize(
    ("position", "head_width"), [("relative", 8), ("none", 8), ("rotary", 8), ("rotary", 1)]
)
@torch.no_grad()
def test_the_encoder(position, head_width, tiny_config, examples, make_batch, subsampling):
    """Also what each head makes of it, with noise behind the shorter utterances."""
    sizes = {"position": position, "heads": tiny_config.encoder.width // head_width}
    config = dataclasses.replace(
        tiny_config,
        encoder=dataclasses.replace(tiny_config.encoder, **sizes),
        transducer=LSTM,
    )
    torch.manual_seed(0)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    batch = make_batch(examples)
    mel = model.features(batch.audio, batch.frames)
    slots = mel.values.split([subsampling * frames for frames in mel.layout.lengths])
    features = torch.randn(len(slots), int(mel.lengths.max()), mel.values.shape[1])
    for row, rows, length in zip(features, slots, mel.lengths.tolist(), strict=True):
        row[:length] = rows[:length]
    padded = PaddedEncoder(model)
    found = dict(zip(padded.outputs, padded(features, mel.lengths), strict=True))
    encoded = model.encode(batch)
    expected = {
        "encoded": encoded.values,
        "ctc_log_probs": model.ctc_logits(encoded.values).log_softmax(-1),
        "encoder_projected": model.transducer.encoder_projection(encoded.values),
    }
    assert found["encoded_lengths"].tolist() == list(encoded.layout.lengths)
    for name, rows in expected.items():
        real = [one[:n] for one, n in zip(found[name], encoded.layout.lengths, strict=True)]
        torch.testing.assert_close(torch.cat(real), rows, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        LSTM,
        dataclasses.replace(LSTM, predictor="stateless", durations=(0, 1, 2)),
        dataclasses.replace(LSTM, predictor="stateless", context=1, activation="tanh"),
        dataclasses.replace(LSTM, predictor="stateless", context=4),
    ],
)
@torch.no_grad()
def test_the_steps_of_a_transducer(config, tiny_config):
    torch.manual_seed(0)
    config_of_all = dataclasses.replace(tiny_config, transducer=config)
    model = ASRModel(config_of_all, VOCABULARY).eval()
    shake(model)
    head = model.transducer
    predictor, joint = predictor_step(head), JointStep(head)
    expected, after = head.begin(3)
    tokens = torch.full((3,), head.blank_id)
    states = [state.begin(3) for state in predictor.states]
    for frame in torch.randn(6, 3, config.joint):
        found, *states = predictor(tokens, *states)
        torch.testing.assert_close(found, expected)
        for mine, theirs in zip(in_model_layout(tuple(states)), after, strict=False):
            torch.testing.assert_close(mine, theirs)
        scores = joint(frame, found)
        assert len(scores) == 1 + (config.durations is not None)
        torch.testing.assert_close(torch.cat(scores, -1), head.logits(frame, expected))
        tokens = torch.randint(VOCABULARY, (3,))
        expected, after = head.step(tokens, after)
