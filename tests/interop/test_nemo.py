"""NeMo itself made the models in `nemo/`, and noted what they compute; see `nemo/make.py`."""

import itertools
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import FASTCONFORMER
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import train_tokenizer
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.nemo.archive import read_archive
from effasr.interop.nemo.checkpoint import export_nemo, import_nemo
from effasr.interop.nemo.config import read_contexts, read_convolution, write_contexts
from effasr.interop.nemo.tokenizer import nemo_tokens
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig, FastConformerEncoder
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context
from tests.support.small_model import shake

FOLDER = Path(__file__).parent / "nemo"
STREAMING = {
    "streaming_ctc": (Context(4, 0, 2), Context(6, 0, 3)),
    "streaming_hybrid": (Context(9, 0, 3), Context(4, 0, 1)),
}
CASES = ("ctc", "rnnt", "hybrid", "canary", "flash", "unified", *STREAMING)
CANARIES = ("canary", "flash", "unified")
LENGTHS = (4037, 12345, 8000)
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def imported(case):
    return import_nemo(FOLDER / f"{case}.nemo")


@pytest.fixture(scope="module")
def model(imported):
    return model_of(imported)


@pytest.fixture(scope="module")
def expected(case):
    return dict(np.load(FOLDER / f"{case}.npz"))


def model_of(found):
    return ASRModel.from_state_dict(found.config, found.vocab_size, found.state).eval()


def batch_of(texts=None, framing=FASTCONFORMER):
    """The utterances of `nemo/make.py`, packed, and what their decoder or predictor reads."""
    generator = np.random.RandomState(0)
    examples = [
        Example(
            id=str(number),
            audio=(0.1 * generator.randn(samples)).astype(np.float32),
            prompt=[0],
            text=[] if texts is None else texts[number].tolist(),
        )
        for number, samples in enumerate(LENGTHS)
    ]
    return collate(examples, None, eos_id=0, pad_id=0, framing=framing)


def parts(values, offsets):
    return [values[begin:end] for begin, end in itertools.pairwise(offsets)]


def assert_same(actual, expected, what):
    assert actual.shape == expected.shape, what
    error = np.abs(actual.numpy() - expected).max()
    assert error < TOLERANCE, f"{what}: {error:.2g}"


@torch.no_grad()
def test_features_and_encoder_are_nemos(model, expected):
    batch = batch_of(framing=model.config.features.framing)
    mel = model.features(batch.audio, batch.frames)
    rows = parts(mel.values, [8 * offset for offset in batch.frames.cu_seqlens_host])
    encoded = parts(model.encoder(mel).values, batch.frames.cu_seqlens_host)
    for number, samples in enumerate(LENGTHS):
        # NeMo has a row more than this, half of it silence, which it hides from the encoder.
        real = samples // model.config.features.hop
        assert_same(rows[number][:real], expected[f"mel_{number}"], f"features of {number}")
        assert_same(encoded[number], expected[f"encoded_{number}"], f"frames of {number}")


@pytest.mark.parametrize("case", ["ctc", "hybrid", *STREAMING], scope="module")
@torch.no_grad()
def test_scores_of_ctc_are_nemos(model, expected):
    batch = batch_of(framing=model.config.features.framing)
    scores = model.ctc_logits(model.encode(batch).values).log_softmax(-1)
    for number, part in enumerate(parts(scores, batch.frames.cu_seqlens_host)):
        assert_same(part, expected[f"ctc_{number}"], f"scores of {number}")


@pytest.mark.parametrize("case", ["rnnt", "hybrid", "streaming_hybrid"], scope="module")
@torch.no_grad()
def test_scores_and_greedy_search_of_a_transducer_are_nemos(model, imported, expected):
    head = model.transducer
    batch = batch_of(expected["labels"], model.config.features.framing)
    encoded = model.encode(batch)
    frames = parts(head.encoder_projection(encoded.values), batch.frames.cu_seqlens_host)
    predicted = head.predictor_projection(head.predictor(batch.text.values, batch.text.layout))
    rows = batch.text.layout.lengthened(1).cu_seqlens_host
    for number, (frame, label) in enumerate(zip(frames, parts(predicted, rows), strict=True)):
        scores = head.logits(frame[:, None], label[None])
        assert_same(scores, expected[f"joint_{number}"], f"scores of {number}")
    for number, tokens in enumerate(transducer_greedy(head, encoded, max_symbols=10)):
        assert list(tokens) == expected[f"greedy_{number}"].tolist()
        if imported.tokenizer.is_unified:
            assert imported.tokenizer.decode(tokens) == expected[f"text_{number}"]


@pytest.mark.parametrize(
    ("case", "context"),
    [(case, context) for case, contexts in STREAMING.items() for context in contexts],
    scope="module",
)
@torch.no_grad()
def test_frames_of_every_context_are_nemos(model, expected, context):
    """Of whole utterances, and of streams, by its `cache_aware_stream_step`."""
    features, encoder = model.config.features, cast(FastConformerEncoder, model.encoder)
    assert context in encoder.config.context
    batch = batch_of(framing=features.framing)
    mel = model.features(batch.audio, batch.frames)
    encoder.evaluate_with(context)
    whole = parts(encoder(mel).values, batch.frames.cu_seqlens_host)
    encoder.evaluate_with(encoder.config.context[0])
    rows = parts(mel.values, [8 * offset for offset in batch.frames.cu_seqlens_host])
    name = f"{context.left}x{context.chunk - 1}"
    for number, samples in enumerate(LENGTHS):
        assert_same(whole[number], expected[f"masked_{name}_{number}"], f"frames of {number}")
        stream = StreamingEncoder(encoder, features.mel_bins, 1, context)
        remaining, result = features.encoder_frames(samples), []
        for chunk in rows[number][: samples // features.hop].split(8 * context.chunk):
            size = min(context.chunk, remaining)
            result.append(_step(stream, chunk, size, context))
            remaining -= size
        if remaining:
            result.append(_step(stream, rows[number][:0], remaining, context))
        ours, theirs = torch.cat(result), expected[f"streamed_{name}_{number}"]
        assert_same(ours, expected[f"masked_{name}_{number}"], f"stream {number}")
        # NeMo's first chunk has a row for its first frame and 8 for each other one, and its last
        # chunk is dropped where it has fewer than 8.
        last = (samples // features.hop - 8 * context.chunk + 7) % (8 * context.chunk)
        assert len(ours) - len(theirs) == (0 < last < 8)
        # If the first chunk has one row, NeMo takes the zeros before it for mel rows.
        same = len(theirs) if context.chunk > 1 else 1
        assert_same(ours[:same], theirs[:same], f"NeMo's stream {number}")


def _step(stream, rows, frames, context):
    padded = rows.new_zeros(1, 8 * context.chunk, rows.shape[1])
    padded[0, : len(rows)] = rows
    return stream.step(padded, [len(rows)], [frames])[0, :frames]


@pytest.mark.parametrize("case", CANARIES, scope="module")
@torch.no_grad()
def test_scores_of_a_canary_are_nemos(model, expected):
    batch = batch_of(expected["tokens"])
    hidden, _ = model.decode(batch.text, model.encode(batch))
    scores = model.logits(hidden).log_softmax(-1)
    for number, part in enumerate(parts(scores, batch.text.layout.cu_seqlens_host)):
        assert_same(part, expected[f"logits_{number}"], f"scores of {number}")


def test_what_is_imported_is_as_the_file_says(imported, case):
    config, encoder = imported.config, imported.config.encoder
    assert isinstance(encoder, FastConformerConfig)
    assert config.spec_augment.time_masks == 10
    assert config.spec_augment.time_width == 0.05
    kinds = ("input", "position", "residual", "activation", "attention")
    dropouts = [getattr(encoder, f"{kind}_dropout") for kind in kinds]
    assert dropouts == [0.05, 0.02, 0.1, 0.1, 0.15]
    assert encoder.bias == encoder.convolution_bias == (case != "ctc")
    assert encoder.scale_input == (case == "ctc")
    if config.decoder is not None:
        assert config.decoder.input_dropout == 0.1
        assert config.decoder.residual_dropout == 0.2
        assert imported.vocab_size % 8 == 0
    if config.transducer is not None:
        assert config.transducer.durations == ((0, 1, 2, 3) if case == "hybrid" else None)
        assert config.transducer.sigma == (0.02 if case == "hybrid" else 0)
        assert config.transducer.fastemit == (0 if case == "hybrid" else 0.005)
    requested = Prompt("de", "de", punctuation=False) if case == "flash" else Prompt()
    assert imported.prompt == requested


def test_export_is_the_inverse_of_import(model, imported, case, tmp_path):
    name = export_nemo(model, imported.tokenizer, tmp_path / "out.nemo", imported.prompt)
    again = import_nemo(tmp_path / "out.nemo")
    assert (again.config, again.vocab_size) == (imported.config, imported.vocab_size)
    assert again.prompt == imported.prompt
    assert again.tokenizer.models == imported.tokenizer.models
    assert again.state.keys() == imported.state.keys()
    for key, value in imported.state.items():
        assert torch.equal(again.state[key], value), key

    theirs, ours = read_archive(FOLDER / f"{case}.nemo"), read_archive(tmp_path / "out.nemo")
    assert ours.config["target"] == theirs.config["target"]
    assert ours.config["target"].endswith(name)
    for section in ("encoder", "spec_augment", "preprocessor", "transf_decoder", "head"):
        ours_of, theirs_of = (item.config.get(section, {}) for item in (ours, theirs))
        for key in theirs_of.keys() - {"pos_emb_max_len", "dither", "config_dict"}:
            assert ours_of[key] == theirs_of[key], f"{section}.{key}"
    # The output layer of a joint network is after its dropout, if there is one.
    renamed = {key.replace("joint_net.2", "joint_net.1"): key for key in theirs.weights}
    assert ours.weights.keys() == renamed.keys()
    for key, value in ours.weights.items():
        assert torch.allclose(value, theirs.weights[renamed[key]], atol=1e-6), key


TEXTS = {
    "en": ["the red dog ran to the barn", "a cat and a dog", "go home now"],
    "de": ["der rote hund lief zum haus", "das ist ein haus", "geh heim"],
}
DECODER = DecoderConfig(width=12, layers=1, heads=2, feed_forward=20, bias=False, output_bias=False)
TDT = TransducerConfig(width=12, joint=20, durations=(0, 1, 2, 4))
OWN = {
    "ctc": {"ctc": True},
    "rnnt": {"transducer": TransducerConfig(width=12, joint=10, layers=2, activation="tanh")},
    "hybrid": {"ctc": True, "transducer": TDT},
    "canary": {"ctc": True, "decoder": DECODER, "text_encoder": TextEncoderConfig(heads=2)},
}
SIZES = {"width": 16, "heads": 2, "feed_forward": 32, "subsampling_channels": 6}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Of one language, and of two with a third that is only spoken."""
    folder = tmp_path_factory.mktemp("tokenizers")
    item = train_tokenizer({"en": TEXTS["en"]}, folder / "one", vocab_size=30)
    return [item, train_tokenizer(TEXTS, folder / "two", vocab_size=30, sources=["fr"])]


def test_a_canary_with_a_shared_model_is_refused(tmp_path):
    shared = train_tokenizer(TEXTS, tmp_path, vocab_size=30, shared=True)
    with pytest.raises(ValueError, match="a model for each language"):
        nemo_tokens(shared, prompts=True)
    assert len(nemo_tokens(shared, prompts=False).vocabulary) == 30


@pytest.mark.parametrize(("name", "subsampling"), [*((name, 8) for name in OWN), ("ctc", 4)])
@torch.no_grad()
def test_a_model_of_our_own_goes_out_with_its_tokenizer(name, subsampling, tokenizers, tmp_path):
    """NeMo itself checks such files with `nemo/make.py --compare`; here they come back."""
    tokenizer = tokenizers[name in ("rnnt", "canary")]
    # NeMo has biases in all layers or in none.
    encoder = FastConformerConfig(
        **SIZES, layers=1, subsampling=subsampling, convolution_bias=False
    )
    config = ModelConfig(**{"encoder": encoder, "decoder": None, **OWN[name]})
    torch.manual_seed(0)
    ours = ASRModel(config, tokenizer.vocab_size).eval()
    for parameter in ours.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    export_nemo(ours, tokenizer, tmp_path / "own.nemo")
    result = import_nemo(tmp_path / "own.nemo")
    theirs = model_of(result)
    assert theirs.config.encoder.subsampling == subsampling

    first = len(tokenizer.specials)
    text, other = tokenizer.encode("a red dog", "en"), result.tokenizer.encode("a red dog", "en")
    framing = config.features.framing
    batches = [batch_of(np.array([ids[:4]] * 3), framing) for ids in (text, other)]
    encoded = [item.encode(batch) for item, batch in zip((ours, theirs), batches, strict=True)]
    assert torch.allclose(encoded[0].values, encoded[1].values, atol=1e-5)
    if name == "canary":
        # Every token has a class there, and what has none here is never chosen.
        order = [result.tokenizer.specials[token] for token in tokenizer.specials]
        shift = other[0] - text[0]
        order += [token + shift for token in range(first, tokenizer.vocab_size)]
        ask = Prompt("fr", "en", "translate")
        assert [order[token] for token in tokenizer.prompt(ask)] == result.tokenizer.prompt(ask)
        scores = [
            item.logits(item.decode(batch.text, frames)[0]).log_softmax(-1)
            for item, batch, frames in zip((ours, theirs), batches, encoded, strict=True)
        ]
        assert torch.allclose(scores[0], scores[1][:, order], atol=1e-4)
        assert scores[1].exp().sum(-1) == pytest.approx(1, abs=1e-5)
        return
    if config.ctc:
        # Tokens of prompts are no labels.
        pairs = zip((ours, theirs), encoded, strict=True)
        scores = [item.ctc_logits(frames.values) for item, frames in pairs]
        assert torch.allclose(scores[0][:, first:], scores[1], atol=1e-4)
    if config.transducer is not None:
        assert [token - first for token in text] == other
        scores = []
        for item, batch in zip((ours, theirs), batches, strict=True):
            head = item.transducer
            predicted = head.predictor(batch.text.values, batch.text.layout)
            scores.append(head.output(head.predictor_projection(predicted).tanh()))
        assert torch.allclose(scores[0][:, first:], scores[1], atol=1e-4)
        # NeMo starts from zeros, wherever ours has learnt to start.
        assert not result.state["transducer.predictor.embedding.weight"][-1].any()
        assert ours.state_dict()["transducer.predictor.embedding.weight"][-1].any()


def _seen_by_nemo(rows, left, right, style):
    """The rule of `ConformerEncoder._create_masks`: bool (rows, rows), query by key."""
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if style == "regular":
        seen = seen.triu(-left) if left >= 0 else seen
        return seen.tril(right) if right >= 0 else seen
    if right == -1:
        return seen.triu(-left) if left >= 0 else seen
    chunk = torch.arange(rows) // (right + 1)
    apart = chunk[:, None] - chunk[None]
    chunks = left // (right + 1) if left >= 0 else 10_000
    return (apart <= chunks) & (apart >= 0)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(
    ("size", "style"),
    [
        ([70, 13], "chunked_limited"),
        ([14, 6], "chunked_limited"),
        ([4, 0], "chunked_limited"),
        ([-1, 3], "chunked_limited"),
        ([6, -1], "chunked_limited"),
        ([8, 4], "regular"),
        ([3, 0], "regular"),
        ([-1, 2], "regular"),
        ([5, -1], "regular"),
    ],
)
def test_a_context_hides_what_nemos_hides(size, style, rows):
    (context,) = read_contexts(size, style)
    hidden = context.hidden(rows, torch.device("cpu"))
    assert torch.equal(~hidden, _seen_by_nemo(rows, *size, style))


def test_what_nemo_has_not_is_not_written():
    assert write_contexts([Context(5, 0, 3)]) is None
    assert write_contexts([Context(6, 1, 3)]) is None
    endless = {"att_context_size": [[6, 2], [-1, 1]], "att_context_style": "chunked_limited"}
    assert write_contexts([Context(6, 0, 3), Context(None, 0, 2)]) == endless
    assert read_contexts(None, "regular") == read_contexts([[-1, -1]], "regular") == ()
    assert read_convolution("causal", 9)
    assert read_convolution([8, 0], 9)
    assert not read_convolution([4, 4], 9)
    with pytest.raises(ValueError, match="must have whole chunks of 3 frames on the left"):
        read_contexts([4, 2], "chunked_limited")


@pytest.mark.parametrize("scaled", [False, True])
@torch.no_grad()
def test_a_norm_after_subsampling_goes_out_as_a_layer(tokenizers, tmp_path, scaled):
    tokenizer, _ = tokenizers
    encoder = FastConformerConfig(**SIZES, layers=2, subsampling_norm=True, scale_input=scaled)
    torch.manual_seed(0)
    ours = ASRModel(ModelConfig(encoder=encoder, decoder=None, ctc=True), tokenizer.vocab_size)
    shake(ours.eval())
    export_nemo(ours, tokenizer, tmp_path / "norm.nemo")
    export_model(ours, tmp_path / "folder")
    expected = ours.encode(batch_of()).values
    for theirs in (
        model_of(import_nemo(tmp_path / "norm.nemo")),
        ASRModel.from_state_dict(*import_model(tmp_path / "folder")).eval(),
    ):
        assert theirs.config.encoder.layers == 3
        torch.testing.assert_close(theirs.encode(batch_of()).values, expected)
