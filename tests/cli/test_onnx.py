"""`effasr export --format onnx`: graphs that onnxruntime runs as effasr does."""

import importlib.util

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import save_file

from effasr.checkpoint import load_model, resolve
from effasr.data.collate import Example, collate
from effasr.data.tokenizer import load_tokenizer
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.interop.onnx.export import check_onnx, export_onnx
from effasr.interop.onnx.infer import Graphs

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow


def texts_of(model, tokenizer, prompt, audio):
    """What effasr's own greedy search says, one recording at a time."""
    for samples in audio:
        batch = collate([Example("x", samples, prompt, [], monotonic=True)], eos_id=0, pad_id=0)
        with torch.no_grad():
            (decoded,) = attention_greedy(
                model, model.encode(batch), [prompt], [12], tokenizer.eos_id, tokenizer.vocab_size
            )
        yield list(decoded.tokens)


@pytest.fixture(scope="module")
def recordings(workplace):
    files = [workplace.folder / f"train-{number}.wav" for number in range(8)]
    return [soundfile.read(file, dtype="float32")[0] for file in files]


@pytest.fixture(scope="module")
def untrained(workplace, recordings):
    """The workplace's model with random weights by which it says one thing here, another there."""
    loaded = load_model(resolve(workplace.run))
    model, prompt = loaded.model.eval(), loaded.tokenizer.prompt(loaded.prompt)
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                gain = 8.0 if "encoder_attn" in name or "embed" in name else 1.0
                if weight.ndim > 1:
                    scale = gain * weight[0].numel() ** -0.5
                    weight.copy_(scale * torch.randn(weight.shape, generator=draw))
        message = texts_of(model, loaded.tokenizer, prompt, recordings)
        if len({tuple(text) for text in message}) >= 4:
            return model
    raise AssertionError("no seed gives texts that differ")


def features_of(model, audio):
    batch = collate([Example("x", audio, [0], [], monotonic=True)], eos_id=0, pad_id=0)
    mel = model.features(batch.audio, batch.frames)
    return mel.values[: int(mel.lengths[0])].numpy()


def test_the_graphs_say_what_the_model_says(effasr, model, untrained, recordings, tmp_path):
    save_file(untrained.state_dict(), model / "model.safetensors")
    loaded = load_model(model)
    out = tmp_path / "onnx"
    done = effasr("export", model, out, "--format", "onnx")
    assert done.code == 0, done.err
    same = "encoder.onnx and decoder_step.onnx, the same as the model in onnxruntime"
    assert done.out == f"{out}: {same}\n"
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    assert load_tokenizer(out).vocab_size == loaded.tokenizer.vocab_size

    graphs, prompt = Graphs(out), loaded.tokenizer.prompt(loaded.prompt)
    assert graphs.says["prompt"] == prompt
    expected_texts = texts_of(untrained, loaded.tokenizer, prompt, recordings)
    for audio, text in zip(recordings, expected_texts, strict=True):
        batch = collate([Example("x", audio, prompt, [], monotonic=True)], eos_id=0, pad_id=0)
        with torch.no_grad():
            expected = untrained.encode(batch).values
            log_probs = untrained.ctc_logits(expected).log_softmax(-1)
        features = graphs.features(audio)
        assert features == pytest.approx(features_of(untrained, audio), abs=1e-3)
        result = graphs.run("encoder", features=features[None], lengths=np.array([len(features)]))
        assert result["encoded"][0] == pytest.approx(expected.numpy(), abs=1e-4)
        assert result["ctc_log_probs"][0] == pytest.approx(log_probs.numpy(), abs=1e-3)
        assert graphs.tokens(features, ctc=False)[:12] == text
        assert graphs.text(text) == loaded.tokenizer.decode(text)
    assert graphs.tokens(features[:0], ctc=True) == []

    # Weights that are not those of the graphs are told.
    with torch.no_grad():
        loaded.model.encoder.layers[0].norm_out.weight.mul_(1.1)
    with pytest.raises(ValueError, match=r"encoder\.onnx: encoded must be what the model computes"):
        check_onnx(loaded.model, out)


def test_the_graphs_can_be_quantized(effasr, model, untrained, recordings, tmp_path):
    """By onnxruntime, to int8: a table that embeddings and outputs share stays two of them."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    assert untrained.decoder.untied_weight is None
    save_file(untrained.state_dict(), model / "model.safetensors")
    exact, small = tmp_path / "onnx", tmp_path / "int8"
    assert effasr("export", model, exact, "--format", "onnx").code == 0
    small.mkdir()
    (small / "onnx.json").write_bytes((exact / "onnx.json").read_bytes())
    for name in ("encoder.onnx", "decoder_step.onnx"):
        quantization.quantize_dynamic(exact / name, small / name)
    step, quantized = Graphs(exact), Graphs(small)
    features = features_of(untrained, recordings[0])
    encoded = step.run("encoder", features=features[None], lengths=np.array([len(features)]))
    sizes = step.says["decoder_step"]
    past = np.zeros((sizes["layers"], 1, sizes["heads"], 0, sizes["head_dim"]), np.float32)
    inputs = {
        "tokens": np.array([step.says["prompt"][0]]),
        "positions": np.array([0]),
        "past_keys": past,
        "past_values": past,
        **{k: encoded[k] for k in ("cross_keys", "cross_values", "encoded_lengths")},
    }
    expected, actual = (
        graphs.run("decoder_step", **inputs)["logits"] for graphs in (step, quantized)
    )
    sizes = [(folder / "decoder_step.onnx").stat().st_size for folder in (small, exact)]
    assert sizes[0] < sizes[1]
    assert np.abs(actual - expected).max() < 0.1 * np.abs(expected).max()


def test_a_package_that_is_not_there(untrained, tmp_path, monkeypatch):
    result = importlib.util.find_spec
    hidden = lambda name: None if name == "onnxscript" else result(name)
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ValueError, match=r"needs the package onnxscript, .* 'effasr\[onnx\]'"):
        export_onnx(untrained, tmp_path, {})
    assert not list(tmp_path.iterdir())
