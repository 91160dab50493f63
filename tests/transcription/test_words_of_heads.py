"""Words have times with every head and search, whatever is decoded with them."""

from dataclasses import replace

import pytest
import torch

from effasr.data.prompt import Prompt
from effasr.decoding import decoded
from effasr.decoding.config import DecodingConfig
from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig
from effasr.nn.attention import CrossAttention
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.recognition import RATE, TRANSDUCER_GAINS, make_model

SECONDS = (0.3, 4.1, 0.7, 2.3, 1.2)


@pytest.fixture(scope="module")
def waveforms(noise) -> list[Waveform]:
    return [Waveform(f"w{n}", noise(s, seed=n), RATE) for n, s in enumerate(SECONDS)]


def without_ctc(model: ASRModel) -> ASRModel:
    other = ASRModel(replace(model.config, ctc=False), model.vocab_size).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    return other


@pytest.fixture(scope="module")
def models(model, tdt_model, tokenizer) -> dict[str, ASRModel]:
    head = TransducerConfig(width=24, joint=16, activation="tanh")
    rnnt = make_model(tokenizer.vocab_size, seed=1, transducer=head, gains=TRANSDUCER_GAINS)
    return {"attention": without_ctc(model), "both": model, "rnnt": rnnt, "tdt": tdt_model}


def results(model, tokenizer, waveforms, **options) -> list[Transcription]:
    config = DecodingConfig(**options)
    return [
        result
        for result in transcribe(model, tokenizer, waveforms, config=config)
        if isinstance(result, Transcription)
    ]


@pytest.mark.parametrize("head", ["attention", "both", "rnnt", "tdt"])
@pytest.mark.parametrize("search", [{}, {"beam": 3}, {"beam": 3, "nbest": 2}, {"boost": "three"}])
def test_words_of_every_head(models, tokenizer, waveforms, head, search, tmp_path) -> None:
    model = models[head]
    if "boost" in search:
        (tmp_path / "phrases.txt").write_text(search["boost"])
        search = {"boost": tmp_path / "phrases.txt", "boost_weight": 4.0}
    timed = results(model, tokenizer, waveforms, words=True, **search)
    plain = results(model, tokenizer, waveforms, **search)
    assert [result.text for result in timed] == [result.text for result in plain]
    assert len({result.text for result in timed}) > 2, "the test needs different texts"
    missing = 0
    for result in timed:
        for segment in result.segments:
            if segment.words is None:
                missing += 1
                continue
            assert [word.text for word in segment.words] == segment.text.split()
            times = [time for word in segment.words for time in (word.start, word.end)]
            assert times == sorted(times)
            assert all(segment.start <= time <= segment.end for time in times)
    # Of random weights, some texts have more tokens than CTC has frames.
    assert missing == 0 or head == "both"
    # Alone, the words have the same times.
    single = [results(model, tokenizer, [w], words=True, **search)[0] for w in waveforms]
    for one, other in zip(single, timed, strict=True):
        assert [item.words for item in one.segments] == [item.words for item in other.segments]


def test_words_where_possible(models, tokenizer, waveforms) -> None:
    """As subtitles ask for them: with the same times, and without an error in translations."""
    timed = results(models["both"], tokenizer, waveforms, words=True)
    implied = results(models["both"], tokenizer, waveforms, words=None)
    assert [item.segments for item in implied] == [item.segments for item in timed]
    translation = Prompt("en", "de", "translate")
    config = DecodingConfig(words=None)
    for item in transcribe(
        models["both"], tokenizer, waveforms[:2], prompt=translation, config=config
    ):
        assert isinstance(item, Transcription)
        assert all(segment.words == () for segment in item.segments)
    with pytest.raises(ValueError, match="`words` must be false for a translation"):
        transcribe(
            models["both"], tokenizer, waveforms[:2], prompt=translation,
            config=DecodingConfig(words=True),
        )  # fmt: skip


@pytest.mark.parametrize("frame_seconds", [0.02, 0.08])
@pytest.mark.parametrize("seed", range(4))
def test_attention_that_follows_the_speech_is_followed(seed, frame_seconds) -> None:
    """Of two heads, one of them blurred, with silence before the speech and after it."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (12,), generator=draw) * round(0.08 / frame_seconds)
    ends = lengths.cumsum(0)
    centres = torch.cat([ends - lengths / 2, ends[-1:] + 8.0])
    frames = torch.arange(int(ends[-1]) + 16)
    heads = []
    for width in (1.5, 4.0):
        logits = -(((frames - centres[:, None]) / (width * lengths.max() / 8)) ** 2)
        heads.append((logits + 0.3 * torch.randn(logits.shape, generator=draw)).softmax(-1))
    spans = decoded._spans(torch.stack(heads).double(), frame_seconds)
    assert spans is not None
    begins = [int(first) for first in [0, *ends[:-1]]]
    for (first, last), begin, end in zip(spans, begins, ends.tolist(), strict=True):
        assert begin - 1 <= first < last <= end + 1
    assert decoded._spans(torch.zeros(2, 3, 0).double(), frame_seconds) is None


def test_heads_of_the_alignment(model) -> None:
    """Those that a Whisper names, or the upper half of the layers."""
    decoder = model.config.decoder
    assert decoded._heads(decoder) == ((1, 0), (1, 1))
    assert decoded._heads(replace(decoder, alignment_heads=((0, 1),))) == ((0, 1),)


def test_weights_of_each_head() -> None:
    torch.manual_seed(0)
    attention = CrossAttention(16, 4, 4)
    x, encoded = torch.randn(5, 16), torch.randn(9, 16)
    weights = attention.head_weights(x, encoded)
    assert weights.shape == (4, 5, 9)
    keys, _ = attention.keys_values(encoded)
    lengths = torch.full((1,), 9)
    mean = attention.weights(x, keys.transpose(0, 1)[None], lengths)
    torch.testing.assert_close(weights.mean(0), mean)
