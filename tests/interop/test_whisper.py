"""Whisper here is transformers' Whisper: of utterances with silence behind them, and without."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import collate
from effasr.data.tokenizer import WhisperTokenizer
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.decoding.decoded import align_by_attention, alignment_weights
from effasr.decoding.timestamps import TimestampRules
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.huggingface.whisper import WHISPER
from effasr.interop.onnx.plain_model import PaddedDecoderStep, PaddedEncoder
from effasr.interop.tables import export_weights, import_weights
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model, recomputed_costs
from effasr.model.learning_cost import learning_cost, unreached_layers
from effasr.nn.positions import whisper_sinusoids
from effasr.nn.stack import apply_activation_checkpointing
from tests.interop.whisper import (
    EOS,
    SECONDS,
    make_timed_whisper,
    make_tokenizer,
    make_whisper,
    spoken,
    transformers,
)

LENGTHS = (16_005, 32_000, 777, 24_480)
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
TOKENS = SpecialTokens(pad_id=EOS, bos_id=EOS, eos_id=EOS, decoder_start_id=EOS + 1)


@pytest.fixture
def theirs(whisper_checkpoint):
    return transformers.WhisperForConditionalGeneration.from_pretrained(whisper_checkpoint).eval()


@pytest.fixture
def prompt(whisper_checkpoint):
    names = "<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"
    return [make_tokenizer().token_to_id(name) for name in names]


def load(whisper_checkpoint, minimum_s):
    config, vocab_size, state = import_model(whisper_checkpoint)
    assert config.features.minimum_s == SECONDS
    config = dataclasses.replace(
        config, features=dataclasses.replace(config.features, minimum_s=minimum_s)
    )
    return ASRModel.from_state_dict(config, vocab_size, state).eval()


def packed(model, examples, *, static):
    framing = model.config.features.framing
    shape = (
        StaticShape(500, 100, 6, longest_frames=100, longest_tokens=40, framing=framing)
        if static
        else None
    )
    return collate(examples, shape, eos_id=EOS, pad_id=EOS, framing=framing)


def alone(theirs, frames):
    """The model as it would be if its window had so many frames."""
    config = transformers.WhisperConfig(
        **{**theirs.config.to_dict(), "max_source_positions": frames}
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    state = theirs.state_dict()
    del state["model.encoder.embed_positions.weight"]
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model


@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
@pytest.mark.parametrize("minimum_s", [SECONDS, 0.0], ids=["window", "alone"])
def test_encoder_logits_loss_and_gradients(minimum_s, static, whisper_checkpoint, theirs, prompt):
    model, examples = load(whisper_checkpoint, minimum_s), spoken(LENGTHS, prompt)
    batch = packed(model, examples, static=static)
    encoded = model.encode(batch)
    hidden, _ = model.decode(batch.tokens, encoded)
    logits = model.logits(hidden)
    loss = model(batch).cross_entropy.sum()
    loss.backward()
    result = export_weights({name: x.grad for name, x in model.named_parameters()}, WHISPER)
    # Without silence of its own, the longest utterance also ends as if silence followed.
    window = SECONDS if minimum_s else 2 * SECONDS
    extractor = transformers.WhisperFeatureExtractor(chunk_length=window)
    total, gradients = 0.0, dict.fromkeys(result, 0)
    starts = zip(batch.frames.cu_seqlens_host, batch.tokens.layout.cu_seqlens_host, strict=True)
    for example, (frame, token) in zip(examples, starts, strict=False):
        frames = model.config.features.encoder_frames(len(example.audio))
        assert frames == (100 if minimum_s else -(-(len(example.audio) // 160) // 2))
        oracle = alone(theirs, frames)
        features = extractor(example.audio, sampling_rate=16_000, return_tensors="pt")
        read = torch.tensor([example.prompt + example.text])
        targets = torch.tensor([-100] * (len(prompt) - 1) + [*example.text, EOS])
        out = oracle(
            input_features=features.input_features[..., : 2 * frames], decoder_input_ids=read
        )
        states = out.encoder_last_hidden_state[0]
        torch.testing.assert_close(encoded.values[frame : frame + frames], states, **TOLERANCE)
        mine = logits[token : token + read.shape[1]]
        torch.testing.assert_close(mine, out.logits[0], **TOLERANCE)
        item = torch.nn.functional.cross_entropy(out.logits[0], targets, reduction="sum")
        item.backward()
        total += item.item()
        for name, parameter in oracle.named_parameters():
            if name in result:
                gradients[name] = gradients[name] + parameter.grad
    assert loss.item() == pytest.approx(total, rel=1e-5)
    places = {"model.encoder.embed_positions.weight"}
    assert result.keys() == {name for name, _ in theirs.named_parameters()} - places
    for name, expected in gradients.items():
        scale = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(result[name] / scale, expected / scale, **TOLERANCE)


def generated(theirs, whisper_checkpoint, example, **options):
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(whisper_checkpoint)
    features = extractor(example.audio, sampling_rate=16_000, return_tensors="pt").input_features
    read, count = torch.tensor([example.prompt]), len(example.prompt)
    (tokens,) = theirs.generate(features, decoder_input_ids=read, max_length=40, **options).tolist()
    tokens = tokens[count:] if tokens[:count] == example.prompt else tokens
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


@torch.no_grad()
def test_attention_of_the_alignment_heads(whisper_checkpoint, theirs, prompt):
    """It is that of transformers, and gives each token a frame, in order."""
    model, examples = load(whisper_checkpoint, SECONDS), spoken(LENGTHS, prompt)
    encoded = model.encode(packed(model, examples, static=False))
    prompts, texts = [prompt] * len(examples), [example.text for example in examples]
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(whisper_checkpoint)
    theirs.set_attn_implementation("eager")
    results = alignment_weights(model, encoded, prompts, texts)
    for example, weights in zip(examples, results, strict=True):
        features = extractor(example.audio, sampling_rate=16_000, return_tensors="pt")
        read = torch.tensor([prompt + example.text])
        out = theirs(features.input_features, decoder_input_ids=read, output_attentions=True)
        expected = [out.cross_attentions[layer][0, head] for layer, head in ((0, 1), (1, 0))]
        rows = torch.stack(expected)[:, len(prompt) - 1 :].double()
        torch.testing.assert_close(weights, rows, **TOLERANCE)
    spans = align_by_attention(model, encoded, prompts, texts)
    for text, result in zip(texts, spans, strict=True):
        frames = [frame for span in result for frame in span]
        assert len(result) == len(text)
        assert sorted(first for first, _ in result) == [first for first, _ in result]
        assert min(frames) >= 0
        assert max(frames) <= 100


@torch.no_grad()
def test_transcripts_are_those_of_generate(whisper_checkpoint, theirs, prompt):
    """Among them tokens that would be said, were they not suppressed."""
    model, examples = load(whisper_checkpoint, SECONDS), spoken(LENGTHS, prompt)
    encoded = model.encode(packed(model, examples, static=False))
    prompts, limits = [prompt] * len(examples), [36] * len(examples)

    def with_suppressed(always, first):
        decoder = dataclasses.replace(model.config.decoder, suppress=always, begin_suppress=first)
        config = dataclasses.replace(model.config, decoder=decoder)
        return ASRModel.from_state_dict(config, model.vocab_size, model.state_dict()).eval()

    unbarred = attention_greedy(with_suppressed((), ()), encoded, prompts, limits, EOS)
    message = [item.tokens[0] for item in unbarred if item.tokens]
    # Suppress what it says most, and what it begins with.
    often = [token for item in unbarred for token in item.tokens]
    always, first = max(set(often), key=often.count), message[0]
    barred = with_suppressed((always, 7), (first, EOS))
    theirs.generation_config.suppress_tokens = [always, 7]
    theirs.generation_config.begin_suppress_tokens = [first, EOS]
    expected = [generated(theirs, whisper_checkpoint, example) for example in examples]
    for slots in (len(examples), 2):
        result = attention_greedy(barred, encoded, prompts, limits, EOS, slots=slots)
        assert [list(item.tokens) for item in result] == expected
    assert [list(item.tokens) for item in unbarred] != expected
    for beam in (1, 3):
        result = attention_beam(barred, encoded, prompts, limits, EOS, beam=beam)
        if beam == 1:
            assert [list(item.tokens) for item in result] == expected
        for item in result:
            assert item.tokens
            assert item.tokens[0] != first
            assert always not in item.tokens


@torch.no_grad()
@pytest.mark.parametrize("latest_initial", [None, 5])
def test_timestamps_are_those_of_generate(latest_initial, tmp_path, prompt):
    """Token for token; texts have several parts, as positions are most of what the decoder sees."""
    theirs = make_timed_whisper(tmp_path, latest_initial)
    stamps = WhisperTokenizer(tmp_path).timestamps
    model, read = load(tmp_path, SECONDS), prompt[:-1]
    examples = spoken(range(3_000, 33_000, 2_000), read)
    expected = [
        generated(theirs, tmp_path, example, return_timestamps=True) for example in examples
    ]
    rules = TimestampRules(stamps, EOS, latest_initial)
    parts = model, model.encode(packed(model, examples, static=False)), [read] * len(examples)
    limits = [40 - len(read)] * len(examples)
    result = attention_beam(*parts, limits, EOS, beam=1, timestamps=rules)
    assert [list(item.tokens) for item in result] == expected


def test_what_is_imported_is_exported_bit_by_bit(whisper_checkpoint, tmp_path):
    model = load(whisper_checkpoint, SECONDS)
    assert export_model(model, tmp_path, TOKENS) == "WhisperForConditionalGeneration"
    before, after = (
        transformers.WhisperForConditionalGeneration.from_pretrained(folder).state_dict()
        for folder in (whisper_checkpoint, tmp_path)
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    config, vocab_size, state = import_model(tmp_path)
    assert (config, vocab_size) == (model.config, model.vocab_size)
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    again, unknown = import_weights(export_weights(state, WHISPER), state, WHISPER)
    assert again.keys() == state.keys()
    assert not unknown
    item, other = (
        transformers.WhisperFeatureExtractor.from_pretrained(folder).to_dict()
        for folder in (whisper_checkpoint, tmp_path)
    )
    for name in ("n_samples", "nb_max_frames", "feature_size", "hop_length", "n_fft"):
        assert item[name] == other[name]


def test_a_model_tuned_without_silence_is_exported_with_a_warning(
    whisper_checkpoint, tmp_path, caplog
):
    export_model(load(whisper_checkpoint, 0.0), tmp_path, TOKENS)
    assert "pads every utterance to 2 s" in caplog.text


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"activation_function": "relu"}, "activation_function` must be gelu"),
        ("config.json", {"scale_embedding": True}, "scale_embedding` must be false"),
        ("config.json", {"num_mel_bins": 128}, "feature_size` must be 128, but is 80"),
        ("config.json", {"decoder_layers": 1}, "missing, unknown or of another shape"),
        ("config.json", {"max_source_positions": 50}, "chunk_length` must be 1.0, but is 2"),
        ("preprocessor_config.json", {"n_fft": 512}, "n_fft` must be 400, but is 512"),
        ("generation_config.json", {"suppress_tokens": [9999]}, "in the vocabulary of"),
    ],
)
def test_what_cannot_be_imported(name, changes, message, whisper_checkpoint, tmp_path):
    folder = shutil.copytree(whisper_checkpoint, tmp_path / "copy")
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **changes}))
    with pytest.raises(ValueError, match=message):
        import_model(folder)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("decoder", {"positions": "sinusoidal"}, "positions=sinusoidal"),
        ("decoder", {"output_bias": True}, "output_bias=true"),
        ("encoder", {"key_bias": True}, "key_bias=true"),
        ("encoder", {"max_frames": 75}, "not whole seconds"),
        ("features", {"hop": 200}, "features.hop=200"),
    ],
)
def test_what_cannot_be_exported(part, changes, message, whisper_checkpoint, tmp_path):
    config, vocab_size, _ = import_model(whisper_checkpoint)
    changed = dataclasses.replace(getattr(config, part), **changes)
    model = ASRModel(dataclasses.replace(config, **{part: changed}), vocab_size)
    with pytest.raises(ValueError, match=message):
        export_model(model, tmp_path, TOKENS)
    assert not (tmp_path / "config.json").exists()


def test_an_encoder_without_decoder_has_no_class_in_transformers(whisper_checkpoint, tmp_path):
    config, vocab_size, _ = import_model(whisper_checkpoint)
    model = ASRModel(dataclasses.replace(config, decoder=None, ctc=True), vocab_size)
    with pytest.raises(ValueError, match="no CTC model with an encoder of kind transformer"):
        export_model(model, tmp_path)


def test_encoder_and_features_must_fit(whisper_checkpoint):
    config, _, _ = import_model(whisper_checkpoint)
    features = dataclasses.replace(config.features, subsampling=8)
    with pytest.raises(ValueError, match=r"`features\.subsampling` must be 2 .* but is 8"):
        ModelConfig(features=features, encoder=config.encoder)


def test_too_long_an_utterance_is_refused(whisper_checkpoint, prompt):
    model = load(whisper_checkpoint, 0.0)
    batch = packed(model, spoken((32_400,), prompt), static=False)
    with pytest.raises(ValueError, match="`max_frames` must be at least the 101 frames"):
        model.encode(batch)


@pytest.mark.parametrize("minimum_s", [SECONDS, 0.0])
def test_predicted_flops_are_those_that_torch_counts(minimum_s, whisper_checkpoint, prompt):
    """Of the forward, and of a backward that computes layers again."""
    model = load(whisper_checkpoint, minimum_s)
    cost = cost_model(model.config, model.vocab_size)
    for example in spoken(LENGTHS, prompt[:1]):
        batch = packed(model, [example], static=False)
        lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            model(batch)
        assert int(cost.of(*lengths)[0]) == forward.get_total_flops()
        counts = []
        for each_item in (0, 1):
            if each_item:
                apply_activation_checkpointing(model, each_item)
            with FlopCounterMode(display=False) as counter:
                model(batch).cross_entropy.sum().backward()
            counts.append(counter.get_total_flops())
        again, _ = recomputed_costs(model.config, model.vocab_size, 1)
        assert int(again.of(*lengths)[0]) == counts[1] - counts[0]
        for layer in (*model.encoder.layers, *model.decoder.layers):
            layer.is_checkpointed = False


@pytest.mark.parametrize("frozen", ["encoder.", "encoder.stem", "decoder."])
def test_flops_of_what_learns(frozen, whisper_checkpoint, prompt):
    model = load(whisper_checkpoint, 0.0)
    batch = packed(model, spoken((24_480,), prompt[:1]), static=False)
    lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    with FlopCounterMode(display=False) as counter:
        model(batch).cross_entropy.sum().backward()
    features = model.config.features
    bands = 2 * 2 * (features.n_fft // 2 + 1) * features.mel_bins
    stem = 2 * 2 * features.mel_bins * 3 * model.config.encoder.width
    # The mel bands have no backward, and the stem's input needs no gradient.
    without = batch.frames.total * (2 * bands + stem) * (frozen == "decoder.")
    if frozen != "decoder.":
        # Nothing before the first layer is trained, and its gradient is asked for nowhere.
        assert unreached_layers(model) == (2 if frozen == "encoder." else 0)
    share = learning_cost(model).of(*lengths)[0]
    # Operations with a loss compute all of their gradients, needed or not.
    assert 3 * share - without == pytest.approx(counter.get_total_flops(), rel=0.01)


@torch.no_grad()
def test_the_padded_model_is_the_packed_one(whisper_checkpoint, prompt):
    """That is what ONNX graphs are made of; with noise behind the shorter utterances."""
    model, examples = load(whisper_checkpoint, 0.0), spoken(LENGTHS, prompt)
    batch = packed(model, examples, static=False)
    encoded, mel = model.encode(batch), model.features(batch.audio, batch.frames)
    features = torch.randn(len(examples), int(mel.lengths.max()), 80)
    for row, rows in zip(features, mel.values.split(mel.lengths.tolist()), strict=True):
        row[: len(rows)] = rows
    states, lengths, keys, values = PaddedEncoder(model)(features, mel.lengths)
    assert lengths.tolist() == list(encoded.layout.lengths)
    real = [item[:length] for item, length in zip(states, lengths, strict=True)]
    torch.testing.assert_close(torch.cat(real), encoded.values, atol=2e-5, rtol=2e-5)
    hidden, _ = model.decode(batch.tokens, encoded)
    logits, step = model.logits(hidden), PaddedDecoderStep(model)
    past = torch.zeros(2, 2, len(examples), 2, 0, 16)
    for position in range(len(prompt)):
        tokens = torch.tensor([example.prompt[position] for example in examples])
        positions = torch.full_like(tokens, position)
        message, *past = step(tokens, positions, *past, keys, values, lengths)
        rows = torch.tensor(batch.tokens.layout.cu_seqlens_host[:-1]) + position
        torch.testing.assert_close(message, logits[rows], atol=2e-5, rtol=2e-5)


TABLE = "encoder.embed_positions.weight"


@pytest.fixture
def learned(tmp_path):
    (tmp_path / "one").mkdir()
    make_whisper(tmp_path / "one")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "one").eval()
    table = model.model.encoder.embed_positions.weight
    with torch.no_grad():
        table += 0.1 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "one")
    table.requires_grad_()
    return model


def test_learned_positions_are_read_trained_and_written(learned, tmp_path, caplog):
    config, vocab_size, state = import_model(tmp_path / "one")
    assert "were learnt" in caplog.text
    assert config.encoder.positions == "learned"
    model = ASRModel.from_state_dict(config, vocab_size, state).eval()
    (example,) = spoken([16_005], [make_tokenizer().token_to_id("<|startoftranscript|>")])
    framing = config.features.framing
    batch = collate([example], None, eos_id=EOS, pad_id=EOS, framing=framing)
    encoded = model.encode(batch).values
    extractor = transformers.WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extractor(example.audio, sampling_rate=16_000, return_tensors="pt").input_features
    expected = learned.model.encoder(features).last_hidden_state[0]
    torch.testing.assert_close(encoded, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (encoded * weights).sum().backward()
    (expected * weights).sum().backward()
    table = model.encoder.embed_positions.weight
    gradient = learned.model.encoder.embed_positions.weight.grad
    torch.testing.assert_close(table.grad, gradient, rtol=1e-4, atol=1e-4)

    export_model(model, tmp_path / "out", TOKENS)
    assert torch.equal(import_model(tmp_path / "out")[2][TABLE], table)


def test_learned_positions_begin_with_the_sinusoids_and_count_as_trained(learned, tmp_path):
    config, vocab_size, _ = import_model(tmp_path / "one")
    model = ASRModel(config, vocab_size)
    table = model.encoder.embed_positions.weight
    assert torch.equal(table, whisper_sinusoids(torch.arange(len(table)), table.shape[1]))
    for name, parameter in model.encoder.named_parameters():
        parameter.requires_grad_("embed_positions" in name)
    assert unreached_layers(model) == 0
    table.requires_grad_(False)
    assert unreached_layers(model) == config.encoder.layers
