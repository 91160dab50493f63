"""Adapters by language against models of a single adapter, in batches of several languages."""

from dataclasses import replace

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.prompt import Prompt
from effasr.model.asr import ASRModel
from effasr.nn.lora import LanguageAdapters, LoRAConfig, adapt, adapters, merged, without_adapters
from effasr.transcription.online.streamable import check_model
from tests.model.test_text_encoder import PAIRS, SHARED, TEXT, batch_of
from tests.support.small_model import check_compiled

VOCABULARY = 40
LANGUAGES = "de", "nl"
NUMBERS = [0, 1, 2, 0]  # the third has no adapter
LORA = LoRAConfig(rank=2, alpha=4.0, also_train=("*norm*",))


@pytest.fixture(params=[TEXT, SHARED], ids=["none shared", "one shared"])
def config(request, tiny_config):
    return replace(tiny_config, text_encoder=request.param)


@pytest.fixture
def model(config):
    """Trained adapters of two languages."""
    torch.manual_seed(0)
    model = ASRModel(replace(config, language_adapters=LANGUAGES), VOCABULARY).double().eval()
    adapt(model, replace(LORA, by_language=LANGUAGES))
    with torch.no_grad():
        for layer in adapters(model):
            layer.lora_b.normal_(std=0.5)
    return model


def of_one(model, number):
    """The weights for a language, with its adapter merged; those of the third have none."""
    state = model.state_dict()
    if number == 2:
        state = {name: x for name, x in state.items() if ".lora_" not in name}
    else:
        state = without_adapters(state, (number, 2))
    config = replace(model.config, language_adapters=())
    return ASRModel.from_state_dict(config, VOCABULARY, state).eval()


def single(model, config, number):
    """A model with the adapter of one language beside its weights, as it is trained alone."""
    alone = ASRModel(config, VOCABULARY).double().eval()
    adapt(alone, LORA)
    parts = {"lora_a": 0, "lora_b": 1}
    alone.load_state_dict(
        {
            name: x.chunk(2, parts[last])[number]
            if (last := name.rpartition(".")[2]) in parts
            else x
            for name, x in model.state_dict().items()
        }
    )
    return alone


def of_languages(examples, numbers):
    return [replace(x, expert=n) for x, n in zip(examples, numbers, strict=True)]


@pytest.mark.parametrize("static", [False, True])
def test_an_utterance_is_that_of_the_model_of_its_language(model, examples, make_batch, static):
    for batch, alone in (
        (
            make_batch(of_languages(examples, NUMBERS), static=static),
            [make_batch([example]) for example in examples],
        ),
        (
            batch_of(of_languages(PAIRS, NUMBERS[:3]), StaticShape(40, 50, 6), aligned=True),
            [batch_of([pair], aligned=True) for pair in PAIRS],
        ),
    ):
        losses = model(batch)
        total = losses.cross_entropy + losses.ctc
        expected = torch.zeros((), dtype=torch.float64)
        for number, one in zip(NUMBERS, alone, strict=False):
            parts = of_one(model, number)(one)
            expected = expected + parts.cross_entropy + parts.ctc
        torch.testing.assert_close(total, expected)
    with pytest.raises(
        ValueError, match=r"`expert` must be the number .* by language, but is None"
    ):
        model(replace(batch, expert=None))


def test_a_batch_of_one_language_trains_its_adapter_as_one_alone(
    model, config, examples, make_batch
):
    """Also where layers are computed anew in the backward; the other adapter's gradients are 0."""
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.is_checkpointed = True
    for number in (0, 1):
        gradients = []
        for item in (model, single(model, config, number)):
            losses = item(make_batch(of_languages(examples, [number] * 4), static=True))
            (losses.cross_entropy + losses.ctc).backward()
            gradients.append({n: p.grad for n, p in item.named_parameters() if p.requires_grad})
            item.zero_grad()
        for name, theirs in gradients[1].items():
            ours, last = gradients[0][name], name.rpartition(".")[2]
            if ".lora_" in name:
                ours, other = ours.chunk(2, int(last == "lora_b"))[:: 1 if number == 0 else -1]
                assert not other.any(), name
            torch.testing.assert_close(ours, theirs, msg=name)


def test_a_batch_of_several_trains_as_those_of_each(model, examples, make_batch):
    def gradients(chosen):
        model.zero_grad()
        parts = [
            x for x, n in zip(of_languages(examples, NUMBERS), NUMBERS, strict=True) if n in chosen
        ]
        losses = model(make_batch(parts))
        (losses.cross_entropy + losses.ctc).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    together, *apart = gradients({0, 1, 2}), gradients({0}), gradients({1}), gradients({2})
    for name, total in together.items():
        torch.testing.assert_close(total, sum(part[name] for part in apart), msg=name)


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["itself", "cast"])
def test_steps_of_decoding_are_the_forward(model, examples, make_batch, read, dtype):
    speech = make_batch(of_languages(examples, NUMBERS))
    with torch.no_grad(), merged(model):  # as validation does, which leaves these beside
        encoded = model.encode(speech)
        encoded = encoded.with_values(model.projection(encoded.values))
        hidden, _ = model.decoder(speech.tokens, encoded)
        expected = speech.tokens.with_values(hidden).unpack()
        tokens = speech.tokens.unpack()
        decoder = model.decoder if dtype is None else model.decoder.cast(dtype)
        state = decoder.start(encoded, 3, [x[:read].tolist() for x in tokens])
        for position in range(read, 2):
            step = decoder.step(torch.stack([x[position] for x in tokens]), state)
            torch.testing.assert_close(step, torch.stack([x[position] for x in expected]))


def test_a_stream_needs_a_language_merged(model):
    with pytest.raises(ValueError, match=r"of de, nl: .* --format effasr --merge-language de`"):
        check_model(model, "auto", ())


def test_they_are_saved(model, examples, make_batch):
    again = ASRModel.from_state_dict(model.config, VOCABULARY, model.state_dict()).eval()
    batch = make_batch(of_languages(examples, NUMBERS))
    assert torch.equal(model(batch).cross_entropy, again(batch).cross_entropy)


def test_a_static_shape_is_compiled_once(config, examples, make_batch):
    model = ASRModel(replace(config, language_adapters=LANGUAGES, text_encoder=None), VOCABULARY)
    adapt(model, replace(LORA, by_language=LANGUAGES))
    batches = [
        make_batch(of_languages(examples, numbers), static=True) for numbers in (NUMBERS, [1] * 4)
    ]
    check_compiled(model.eval(), batches, graphs=1)
    torch._dynamo.reset()


def test_a_language_without_an_adapter_has_the_last_number():
    numbers = LanguageAdapters(LANGUAGES)
    assert [numbers.number_of(Prompt(x, x)) for x in ("nl", "de", "en")] == [1, 0, 2]
    assert numbers.number_of(Prompt("de", "en", "translate")) == 0
    with pytest.raises(ValueError, match=r"`language` must be named .* \(de, nl\), but is auto"):
        numbers.number_of(Prompt("auto", "auto"))
