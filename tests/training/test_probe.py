"""The losses of a probe against those of each utterance alone, by hand."""

from dataclasses import replace

import pytest
import torch

from effasr.data.audio.waveform import load_audio
from effasr.data.collate import Example, collate
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import read
from effasr.data.tokenizer import load_tokenizer
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.experts import ExpertsConfig
from effasr.training.diagnostics.probe import Probe, ProbeSums
from effasr_kernels import pack


@pytest.fixture
def cuts(tones):
    return sorted(read(tones / "test.jsonl"), key=lambda cut: -cut.duration)


@pytest.fixture
def tokenizer(tones):
    return load_tokenizer(tones / "tokenizer")


def make_model(tokenizer, **options) -> ASRModel:
    config = ModelConfig(
        **{
            "encoder": FastConformerConfig(
                width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4,
                residual_dropout=0.5, conv_norm="layer_norm",
            ),
            "decoder": DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
            "ctc": True,
            "transducer": TransducerConfig(width=8, joint=8),
            **options,
        },
    )  # fmt: skip
    torch.manual_seed(1)
    model = ASRModel(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    return model


def alone(cut, tokenizer):
    prompt = prompt_of(cut)
    text = tokenizer.encode(cut.supervisions[0].text, prompt.target)
    example = Example(cut.id, load_audio(cut), tokenizer.prompt(prompt), text)
    return collate([example], eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)


@torch.no_grad()
def expected(model, tokenizer, cuts, groups) -> ProbeSums:
    """Each utterance alone; with other audio that of the next one in its group."""
    model.eval()
    sums, batches = ProbeSums(), [alone(cut, tokenizer) for cut in cuts]
    encoded = [model.encode(batch) for batch in batches]
    for group in groups:
        for position, index in enumerate(group):
            batch, local = batches[index], encoded[index]
            losses = model(batch)
            frames, targets = batch.frame_lengths[0], float(batch.num_targets)
            best = model.ctc_logits(local.values).argmax(-1)
            message = transducer_greedy(model.transducer, local, 10)
            sums += ProbeSums(
                targets=targets,
                own=float(losses.cross_entropy),
                ctc_targets=targets,
                ctc_loss=float(losses.ctc),
                ctc_frames=frames,
                ctc_blanks=float((best == tokenizer.vocab_size).sum()),
                transducer_targets=targets,
                transducer_loss=float(losses.transducer),
                transducer_frames=frames,
                labels=len(message[0]),
                tokens=targets - 1,
                frames=frames,
            )
            if len(group) < 2:
                continue
            other = encoded[group[(position + 1) % len(group)]]
            hidden, _ = model.decode(batch.tokens, pack([other.unpack()[0]]))
            counted = batch.targets >= 0
            scores = model.logits(hidden[counted]).log_softmax(-1)
            sums += ProbeSums(
                paired_targets=targets,
                paired_own=float(losses.cross_entropy),
                paired_other=-float(scores.gather(1, batch.targets[counted, None]).sum()),
            )
    return sums


@pytest.mark.parametrize(
    ("count", "budget", "groups"),
    [
        (32, 10_000, [[0, 1, 2, 3, 4, 5]]),
        (32, 1, [[n] for n in range(6)]),
        # Fewer utterances are spread over the set.
        (2, 500, [[0, 3]]),
    ],
)
def test_sums_are_those_of_each_utterance(cuts, tokenizer, count, budget, groups):
    model = make_model(tokenizer)
    probe = Probe(cuts, model, tokenizer, count=count, frame_budget=budget)
    model.train()
    state = torch.get_rng_state()
    result = probe()
    assert torch.equal(torch.get_rng_state(), state), "a resumed run draws the same"
    assert all(module.training for module in model.modules())
    requested = expected(model, tokenizer, cuts, groups)
    for name in ProbeSums.__slots__:
        assert getattr(result, name) == pytest.approx(getattr(requested, name), rel=1e-4), name
    if budget > 1:
        assert abs(result.other_audio - result.own_audio) > 1e-3, "the test needs a difference"
        assert result.summary()["audio_gain"] == result.other_audio - result.own_audio
    else:
        assert result.own_audio is None
        assert "audio_gain" not in result.summary()
    assert probe() == result


def test_without_a_decoder_or_a_head_nothing_is_claimed_of_it(cuts, tokenizer):
    heads = {"decoder": "cross_entropy", "ctc": "ctc", "transducer": "transducer"}
    for selected, field in heads.items():
        options = {"decoder": None, "ctc": False, "transducer": None}
        del options[selected]
        model = make_model(tokenizer, **options)
        result = Probe(cuts, model, tokenizer, count=32, frame_budget=500)()
        assert {name for name in heads.values() if name in result.summary()} == {field}
        assert (result.ctc_blank_share is None) == (selected != "ctc")
        assert (result.transducer_blank_share is None) == (selected != "transducer")


def test_what_cannot_be_used_is_left_out(cuts, tokenizer):
    model = make_model(
        tokenizer, decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16,
                                         max_positions=8)
    )  # fmt: skip
    fitting = [cut for cut in cuts if alone(cut, tokenizer).num_tokens <= 8]
    assert 0 < len(fitting) < len(cuts), "the test needs texts that are too long"
    result = Probe(cuts, model, tokenizer, count=32, frame_budget=500)()
    assert result.targets == sum(alone(cut, tokenizer).num_targets for cut in fitting)
    cuts[0].recording.sources[0].source = "/nowhere.wav"
    assert Probe(cuts[:1], model, tokenizer, count=32, frame_budget=500)() == ProbeSums()
    assert Probe([], model, tokenizer, count=32, frame_budget=500)() == ProbeSums()


def test_a_request_without_an_expert_is_left_out(cuts, tokenizer):
    def measure(*languages: str) -> ProbeSums:
        experts = ExpertsConfig(count=len(languages), route="language", names=languages)
        encoder = replace(make_model(tokenizer).config.encoder, experts=experts)
        model = make_model(tokenizer, encoder=encoder)
        return Probe(cuts[1:], model, tokenizer, count=32, frame_budget=500)()

    assert measure("xx") == ProbeSums()
    assert measure("xx", "en") != ProbeSums()
