import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from effasr.data.collate import Example
from effasr.data.features.config import FeatureConfig
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.checks import choose_method
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import Decoded
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import Transducer, TransducerConfig
from effasr.transcription.recognizer import Recognizer
from effasr_kernels import pack
from tests.decoding.cases import (
    assert_independent_of_batch,
    decode_all,
    make_examples,
    make_frames,
    make_head,
)
from tests.decoding.cases import (
    best_transducer_beam as transducer_beam,
)

LABELS, JOINT = 6, 7
KINDS = {
    "lstm": TransducerConfig(predictor="lstm", width=8, layers=2, joint=JOINT),
    "stateless": TransducerConfig(predictor="stateless", width=8, joint=JOINT, activation="tanh"),
    "context 3": TransducerConfig(predictor="stateless", width=8, context=3, joint=JOINT),
}


def head_of(kind: str, seed: int = 0, *, blank: float = 0.5) -> Transducer:
    return make_head(KINDS[kind], LABELS, seed, blank=blank)


@torch.no_grad()
def frame_by_frame(head: Transducer, frames: Tensor, max_symbols: int) -> list[int]:
    """The definition of greedy search, for one utterance, with whole transcripts every time."""
    said: list[int] = []
    for frame in head.encoder_projection(frames):
        for _ in range(max_symbols):
            labels = pack([torch.tensor(said, dtype=torch.int64)])
            predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
            symbol = int(head.logits(frame, predicted[-1]).argmax())
            if symbol == LABELS:
                break
            said.append(symbol)
    return said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
@torch.no_grad()
def test_greedy_is_frame_by_frame(kind: str, max_symbols: int) -> None:
    several = 0
    for seed in range(4):
        head = head_of(kind, seed, blank=1.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, seed=seed)
        found = transducer_greedy(head, encoded, max_symbols)
        sequences = encoded.unpack()
        assert found == [frame_by_frame(head, one, max_symbols) for one in sequences]
        several += sum(len(said) > len(one) for said, one in zip(found, sequences, strict=True))
    assert several or max_symbols == 1, "the test needs several labels at one frame"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(kind="context 3")
@torch.no_grad()
def test_a_beam_of_one_is_greedy(kind: str) -> None:
    compared = set()
    for seed in range(4):
        head = head_of(kind, seed, blank=2.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, seed=seed)
        unbounded = transducer_greedy(head, encoded, 100)
        for said, found in zip(unbounded, transducer_beam(head, encoded, 1, [50] * 6), strict=True):
            # A frame may go on for ever.
            assert found == (said if len(said) < 50 else said[:50])
            compared.add(tuple(found))
    assert len(compared) > 5, "the test needs different texts"


def every_text(longest: int) -> list[list[int]]:
    texts = (itertools.product(range(LABELS), repeat=n) for n in range(longest + 1))
    return [list(text) for of_one_length in texts for text in of_one_length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(kind="lstm")
@torch.no_grad()
def test_a_wide_beam_finds_the_likeliest_of_all_texts(kind: str) -> None:
    """Whose likelihood is the sum over all paths, as the loss has it."""
    texts = every_text(2)
    better = 0
    for seed in range(8):
        head = head_of(kind, seed, blank=1.0)
        encoded = make_frames(3, 1, 0, 2, 4, seed=seed)
        found = transducer_beam(head, encoded, 300, [2] * 5)
        for one, said, greedy in zip(
            encoded.unpack(), found, transducer_greedy(head, encoded, 100), strict=True
        ):
            if not len(one):
                assert said == []
                continue
            labels = pack([torch.tensor(text, dtype=torch.int64) for text in texts])
            losses = head(pack([one] * len(texts)), labels)
            assert said == texts[int(losses.argmin())]
            better += said != greedy
    assert better > 2, "the test needs texts that greedy search does not find"


@torch.no_grad()
def test_a_wider_beam_is_likelier() -> None:
    likelihoods = {beam: 0.0 for beam in (1, 2, 8)}
    for seed in range(6):
        head = head_of("lstm", seed, blank=2.0)
        encoded = make_frames(12, 9, 15, seed=seed)
        for beam in likelihoods:
            found = transducer_beam(head, encoded, beam, [40] * 3)
            labels = pack([torch.tensor(text, dtype=torch.int64) for text in found])
            likelihoods[beam] -= head(encoded, labels).sum().item()
    assert likelihoods[1] < likelihoods[2] < likelihoods[8]


@torch.no_grad()
def test_a_beam_keeps_to_the_limits() -> None:
    head = head_of("stateless", 1, blank=-5.0)
    found = transducer_beam(head, make_frames(5, 7, 2), 3, [4, 0, 9])
    assert [len(said) for said in found] == [4, 0, 9]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_state_read_label_by_label_is_that_of_the_transcript(kind: str) -> None:
    head = head_of(kind)
    said = torch.randint(LABELS, (2, 5))
    labels = pack(list(said))
    whole = head.predictor_projection(head.predictor(labels.values, labels.layout)).view(2, 6, -1)
    predicted, state = head.begin(2)
    for n in range(5):
        torch.testing.assert_close(predicted, whole[:, n])
        predicted, state = head.step(said[:, n], state)
    torch.testing.assert_close(predicted, whole[:, 5])


@pytest.fixture(scope="module", params=["lstm", "stateless"])
def model(request, tokenizer: Tokenizer) -> ASRModel:
    """A hybrid whose transcripts differ by utterance."""
    return _model(request.param, tokenizer)


def _model(predictor: str, tokenizer: Tokenizer) -> ASRModel:
    config = ModelConfig(
        features=FeatureConfig(mel_bins=16),
        encoder=FastConformerConfig(
            width=32, layers=1, heads=2, feed_forward=32, subsampling_channels=4,
            subsampling_norm=True,
        ),
        decoder=None,
        transducer=TransducerConfig(
            predictor=predictor,  # type: ignore[arg-type]
            width=24, joint=16, activation="tanh",
        ),
        ctc=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = ASRModel(config, tokenizer.vocab_size).eval()
    assert model.transducer is not None
    with torch.no_grad():
        model.transducer.encoder_projection.weight.mul_(2.0)
        model.transducer.predictor_projection.weight.mul_(4.0)
        model.transducer.output.weight.mul_(4.0)
        # Between always a label and always the blank.
        model.transducer.output.bias[-1] = {"lstm": 6.5, "stateless": 1.5}[predictor]
    return model


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer, noise) -> list[Example]:
    return make_examples(noise, [tokenizer.prompt(Prompt())], monotonic=True)


@pytest.mark.parametrize("beam", [1, 3])
def test_an_utterance_gives_the_same_tokens_in_any_company(
    beam, examples, model, tokenizer
) -> None:
    together = assert_independent_of_batch(examples, model, tokenizer, beam=beam)
    assert max(len(result.tokens) for result in together) > 5


@pytest.mark.parametrize("beam", [1, 3])
def test_half_precision_decodes_too(beam, examples, model, tokenizer) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        results = decode_all(examples, model, tokenizer, beam=beam)
    assert any(result.tokens for result in results)


@pytest.mark.parametrize("beam", [1, 3])
def test_nothing_todecode_all(beam, examples, model, tokenizer) -> None:
    assert decode_all([], model, tokenizer, beam=beam) == []
    empty = replace(examples[0], audio=examples[0].audio[:0])
    assert decode_all([empty, examples[1]], model, tokenizer, beam=beam)[0] == Decoded(())
    assert decode_all([empty], model, tokenizer, beam=beam) == [Decoded(())]


def test_the_method_follows_from_the_model(model, tokenizer) -> None:
    assert choose_method(model, "auto") == "transducer"
    assert choose_method(model, "ctc") == "ctc"
    without = replace(model.config, transducer=None)
    with pytest.raises(ValueError, match="must not be transducer, because this model has no trans"):
        choose_method(ASRModel(without, tokenizer.vocab_size), "transducer")
    with pytest.raises(ValueError, match="`ctc_weight` must be 0 for the method transducer"):
        Recognizer(model, tokenizer, DecodingConfig(ctc_weight=0.3))
    with pytest.raises(ValueError, match="`beam` must be at least 1, but is 0"):
        DecodingConfig(beam=0)
    translation = Prompt("en", "de", "translate")
    with pytest.raises(ValueError, match="must be transcribe for a transducer, which follows"):
        Recognizer(model, tokenizer).prompt(translation)
