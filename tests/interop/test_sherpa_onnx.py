"""sherpa-onnx itself runs the graphs, which `test_onnx.py` runs with onnxruntime alone."""

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.decoding.ctc_greedy import CTCStreams
from effasr.decoding.transducer_greedy import TransducerStreams
from effasr.interop.onnx.sherpa import export_sherpa
from effasr.model.streaming_encoder import StreamingEncoder
from tests.interop.test_onnx import BINS, CONTEXT, PIECES, streaming

sherpa_onnx = pytest.importorskip("sherpa_onnx")
pytest.importorskip("onnxscript")

RATE, ROWS = 16_000, 8 * CONTEXT.chunk
CHUNKS = 7, 4
# It decodes a chunk once a row more has come.
SAMPLES = [160 * (ROWS * chunks + 2) for chunks in CHUNKS]


@pytest.fixture(scope="module")
@torch.no_grad()
def model():
    """A random model whose symbols are about equally likely, blanks likelier."""
    model = streaming()
    framing = model.config.features.framing
    examples = [
        Example(id=str(number), audio=samples, prompt=[0], text=[])
        for number, samples in enumerate(audio())
    ]
    batch = collate(examples, None, eos_id=0, pad_id=0, framing=framing)
    encoded = model.encode(batch).values
    scores = model.ctc_logits(encoded)
    model.ctc_head.bias -= scores.mean(0)
    head = model.transducer
    scores = head.logits(head.encoder_projection(encoded), head.begin(1)[0])
    head.output.bias -= scores.mean(0)
    head.output.bias[head.blank_id] += scores.std(0).mean()
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("sherpa")
    export_sherpa(model, path, PIECES, CONTEXT)
    return path


def recognizer(kind, folder):
    names = {"ctc": ["model"], "transducer": ["encoder", "decoder", "joiner"]}[kind]
    files = {name: str(folder / f"{name}.onnx") for name in names}
    make = sherpa_onnx.OnlineRecognizer
    make = make.from_nemo_ctc if kind == "ctc" else make.from_transducer
    return make(tokens=str(folder / "tokens.txt"), feature_dim=BINS, num_threads=1, **files)


def fed(of, audio):
    stream = of.create_stream()
    stream.accept_waveform(RATE, audio)
    stream.input_finished()
    return stream


def audio():
    """Tones that change, as noise makes all frames alike."""
    draw, result = np.random.default_rng(0), []
    for count in SAMPLES:
        frequency = np.repeat(draw.uniform(100, 6000, count), 1600)[:count]
        phase = 2 * np.pi * np.cumsum(frequency) / RATE
        noise = 0.01 * draw.standard_normal(count)
        result.append((0.3 * np.sin(phase) + noise).astype(np.float32))
    return result


@torch.no_grad()
def expected(model, kind, mel):
    """Tokens of mel rows (T, mel_bins), chunk by chunk."""
    encoder = StreamingEncoder(model.encoder, BINS, 1, CONTEXT)
    search = CTCStreams(model, 1) if kind == "ctc" else TransducerStreams(model.transducer, 1, 10)
    result = []
    for rows in mel.split(ROWS):
        (tokens,) = search.step(encoder.step(rows[None], [ROWS]), [CONTEXT.chunk])
        result += [item.token for item in tokens]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ctc", "transducer"])
def test_streams_of_sherpa_say_what_ours_do(kind, model, folder):
    """To the features that it computes, of two streams in one batch."""
    of = recognizer(kind, folder)
    streams = [fed(of, samples) for samples in audio()]
    while ready := [stream for stream in streams if of.is_ready(stream)]:
        of.decode_streams(ready)
    for stream, samples, chunks in zip(streams, audio(), CHUNKS, strict=True):
        mel = np.array(fed(of, samples).get_frames(0, ROWS * chunks), np.float32)
        tokens = expected(model, kind, torch.from_numpy(mel).view(-1, BINS))
        assert len(set(tokens)) > 3
        assert of.get_result(stream).split() == [str(token) for token in tokens]
