"""The step of a streaming encoder for export is that of `StreamingEncoder`, also in onnxruntime."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr.data.features.config import FeatureConfig
from effasr.interop.onnx.export import check_onnx, export_onnx
from effasr.interop.onnx.plain_model import CACHES, StreamingStep
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context
from tests.support.small_model import VOCABULARY, shake

CONTEXT = Context(5, 0, 3)
BINS = 16
Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def make(**encoder):
    sizes = {"width": 32, "layers": 2, "heads": 2, "feed_forward": 32, "subsampling_channels": 4}
    options = {"causal_convolution": True, "context": (CONTEXT,), "subsampling_norm": True}
    config = ModelConfig(
        features=FeatureConfig(mel_bins=BINS, normalize=False),
        encoder=FastConformerConfig(**(sizes | options | encoder)),
        decoder=None,
        ctc=True,
        transducer=TransducerConfig(width=12, joint=10),
    )
    torch.manual_seed(5)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    return model


def compare(model, run, tolerance):
    """Two streams, of which one begins later, pauses, and ends with a few rows."""
    encoder = StreamingEncoder(model.encoder, BINS, 2, CONTEXT)
    step, factor = StreamingStep(model, CONTEXT), model.config.encoder.subsampling
    size, caches = factor * CONTEXT.chunk, step.begin(2)
    framing = model.config.features.framing
    last = size - 3
    # Rows and frames of both streams in each step; None begins the second one again.
    ends = framing.frames(framing.hop * (size + last)) - 3
    plan: list[tuple[int, int]] = [(size, 0), (size, size), (size, 0), (size, last), (size, 0)]
    draw = torch.Generator().manual_seed(1)
    for number, rows in enumerate(plan):
        features = torch.randn(2, size, BINS, generator=draw)
        frames = [3 if count == size else 0 for count in rows]
        if number == 3:
            frames[1] = min(3, ends)
        elif number == 4:
            # With causal subsampling, a frame is left, whose rows have all come.
            frames[1] = ends - min(3, ends)
        expected = encoder.step(features, rows, frames)
        counts = {"lengths": torch.tensor(rows), "frames": torch.tensor(frames)}
        found = run({"features": features, **counts, **caches})
        assert list(found) == step.outputs
        caches = {name: found[name.replace("cache", "next")] for name in CACHES}
        heads = {
            "encoded": expected,
            "ctc_log_probs": model.ctc_logits(expected).log_softmax(-1),
            "encoder_projected": model.transducer.encoder_projection(expected),
        }
        for name, value in heads.items():
            for slot, count in enumerate(frames):
                torch.testing.assert_close(
                    found[name][slot, :count], value[slot, :count], rtol=tolerance, atol=tolerance
                )
    assert caches["cache_frames"].tolist() == [15, 3 + ends]


KINDS = {
    "relative": {},
    "causal": {"causal_subsampling": True, "conv_norm": "layer_norm"},
    "rotary": {"position": "rotary", "subsampling": 4, "scale_input": True},
    "sinusoids": {"position": "none", "input_positions": 1.0, "bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_step_is_that_of_the_encoder(kind):
    model = make(**KINDS[kind])
    step = StreamingStep(model, CONTEXT).eval()
    compare(model, lambda given: dict(zip(step.outputs, step(**given), strict=True)), 1e-5)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["causal", "relative"])
@torch.no_grad()
def test_onnxruntime_computes_the_step(kind, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make(**KINDS[kind])
    graphs = export_onnx(model, tmp_path, {}, CONTEXT)
    assert graphs == ["encoder_step.onnx", "predictor.onnx", "joint.onnx"]
    check_onnx(model, tmp_path, CONTEXT)
    session = onnxruntime.InferenceSession(tmp_path / graphs[0], providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]

    def run(given):
        arrays = session.run(None, {name: value.numpy() for name, value in given.items()})
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    compare(model, run, 1e-4)
    # The description is of this graph.
    says = json.loads((tmp_path / "onnx.json").read_text())["encoder_step"]
    inputs = {one.name: one for one in session.get_inputs()}
    assert set(inputs) == {*says["inputs"], *says["caches"]}
    assert set(names) == {*says["outputs"], *(one["next"] for one in says["caches"].values())}
    for name, one in says["caches"].items():
        assert inputs[name].shape == one["shape"]
        assert (
            inputs[name].type
            == {"float32": "tensor(float)", "int64": "tensor(int64)"}[one["dtype"]]
        )
    assert np.array_equal(says["context"], {"left": 5, "right": 0, "chunk": 3})


def test_what_cannot_stream_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=r"`encoder\.causal_convolution` must be true"):
        export_onnx(make(causal_convolution=False), tmp_path, {}, CONTEXT)
    with pytest.raises(ValueError, match=r"`context\.right` must be 0 to decode a stream"):
        export_onnx(make(), tmp_path, {}, Context(5, 1, 3))
    with pytest.raises(ValueError, match=r"encoder\.context"):
        export_onnx(make(), tmp_path, {})
