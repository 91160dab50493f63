"""A model that is trained with contexts, and `effasr transcribe --stream` frame by frame."""

import json

import numpy as np
import pytest

from effasr.checkpoint import load_model, resolve
from effasr.transcription.online import OnlineRecognizer
from effasr.transcription.online import recognizer as online_module
from effasr_kernels import Context

RATE = 16_000
CONTEXTS = "[{left: 8, chunk: 4}, {left: 8, chunk: 2}, {left: 4, chunk: 1}]"


@pytest.fixture(scope="module")
def run(workplace, tmp_path_factory):
    """A run of three steps, each with one of three contexts."""
    from effasr.cli.main import main

    folder = tmp_path_factory.mktemp("online")
    overrides = (
        f"model.encoder.context={CONTEXTS}",
        "model.encoder.causal_convolution=true",
        "model.features.normalize=false",
        "training.max_steps=3",
        "training.validate_every=3",
        f"output={folder}",
    )
    assert main(["train", workplace.recipe, *overrides]) == 0
    return folder / "first"


@pytest.fixture
def sharp(monkeypatch):
    """Let the model, which has learnt too little, hear a token wherever two frames differ."""
    load = load_model

    def loaded(*given):
        result = load(*given)
        result.model.ctc_head.bias.data.zero_()
        result.model.ctc_head.weight.data.mul_(30)
        return result

    monkeypatch.setattr("effasr.checkpoint.load_model", loaded)
    return loaded


@pytest.fixture
def noise_piped(piped):
    audio = (0.1 * np.random.default_rng(0).standard_normal(3 * RATE)).astype(np.float32)
    piped(audio.astype("<f4").tobytes())
    return audio


@pytest.mark.parametrize(
    ("latency", "context"),
    [
        ((), Context(8, 0, 4)),
        (("--latency", "160ms"), Context(8, 0, 2)),
        (("--latency", "0.1s", "--words"), Context(4, 0, 1)),
    ],
)
def test_the_latency_is_kept(effasr, run, noise_piped, sharp, monkeypatch, latency, context):
    used = []

    class Recorded(OnlineRecognizer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            used.append(self)

    monkeypatch.setattr(online_module, "OnlineRecognizer", Recorded)
    done = effasr("transcribe", "--run", run, "--stream", "--encoding", "f32le", "--json", *latency)
    assert (done.code, done.err) == (0, "")
    (recognizer,) = used
    assert recognizer.context == context
    stream = recognizer.open()
    stream.feed(noise_piped)
    stream.finish()
    recognizer.decode()
    expected = [segment.as_row() for segment in stream.take()]
    assert [json.loads(line) for line in done.out.splitlines()] == expected
    assert expected
    assert all(("words" in row) == ("--words" in latency) for row in expected)


def test_a_latency_below_the_shortest_chunk_is_refused(effasr, run, piped):
    piped(bytes(2 * RATE))
    done = effasr("transcribe", "--run", run, "--stream", "--latency", "50ms")
    assert done.code == 2
    assert "must be at least 0.08 for this model, its shortest chunk" in done.err


@pytest.mark.slow
@pytest.mark.extended
def test_the_export_is_of_the_context_of_a_latency(effasr, run, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    done = effasr("export", run, tmp_path / "out", "--format", "onnx", "--latency", "160ms")
    assert (done.code, done.err) == (0, "")
    assert "encoder_step.onnx, the same as the model in onnxruntime" in done.out
    says = json.loads((tmp_path / "out/onnx.json").read_text())
    assert says["encoder_step"]["context"] == {"left": 8, "right": 0, "chunk": 2}
    assert "encoder" not in says
    failed = effasr("export", run, tmp_path / "other", "--latency", "160ms")
    assert "`--latency` must be left out for `--format huggingface`" in failed.err


def test_evaluation_takes_the_first_context(run):
    model = load_model(resolve(run)).model
    assert model.encoder.context == Context(8, 0, 4)
