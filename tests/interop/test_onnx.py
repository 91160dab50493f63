"""The plain model that is exported is the packed one, and its graphs compute what it does.

sherpa-onnx's graphs are called as it calls NeMo's: by the order of inputs, sizes by metadata.
`test_sherpa_onnx.py` runs them in sherpa-onnx itself.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.interop.onnx.export import check_onnx, export_onnx
from effasr.interop.onnx.plain_model import (
    CACHES,
    JointStep,
    PaddedEncoder,
    StreamingStep,
    in_model_layout,
    predictor_step,
)
from effasr.interop.onnx.sherpa import BLANK, SherpaStep, export_sherpa
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context
from tests.support.small_model import VOCABULARY, shake

BINS, CONTEXT = 16, Context(5, 0, 3)
PIECES = [f"▁{number}" for number in range(VOCABULARY)]
LSTM = TransducerConfig(width=12, layers=2, joint=10)
STATELESS = dataclasses.replace(LSTM, predictor="stateless")
TDT = dataclasses.replace(STATELESS, context=3, durations=(0, 1, 2, 3))
ENCODER = {
    "width": 16, "layers": 1, "heads": 2, "feed_forward": 16, "subsampling_channels": 4,
    "subsampling_norm": True, "conv_norm": "layer_norm",
}  # fmt: skip


def make(head=LSTM, *, ctc=True, seed=2, features=None, **encoder):
    config = ModelConfig(
        features=FeatureConfig(**{"mel_bins": BINS} | (features or {})),
        encoder=FastConformerConfig(**ENCODER | encoder),
        decoder=None,
        ctc=ctc,
        transducer=head,
    )
    torch.manual_seed(seed)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    return model


def streaming(head=STATELESS, **options):
    """A model of streams with the tokens of `PIECES`."""
    encoder = {
        "layers": 2,
        "conv_kernel": 5,
        "causal_convolution": True,
        "causal_subsampling": True,
        "context": (CONTEXT,),
        "subsampling_norm": False,
    }
    return make(head, seed=3, features={"normalize": False}, **encoder | options)


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


@pytest.mark.parametrize(
    ("position", "head_width"), [("relative", 8), ("none", 8), ("rotary", 8), ("rotary", 1)]
)
@torch.no_grad()
def test_the_padded_encoder(position, head_width, tiny_config, examples, make_batch, subsampling):
    """Also what each head makes of it, with noise behind the shorter utterances."""
    sizes = {"position": position, "heads": tiny_config.encoder.width // head_width}
    config = dataclasses.replace(
        tiny_config,
        encoder=dataclasses.replace(tiny_config.encoder, **sizes),
        transducer=LSTM,
    )
    torch.manual_seed(0)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    batch = make_batch(examples)
    mel = model.features(batch.audio, batch.frames)
    slots = mel.values.split([subsampling * frames for frames in mel.layout.lengths])
    features = torch.randn(len(slots), int(mel.lengths.max()), mel.values.shape[1])
    for row, rows, length in zip(features, slots, mel.lengths.tolist(), strict=True):
        row[:length] = rows[:length]
    padded = PaddedEncoder(model)
    result = dict(zip(padded.outputs, padded(features, mel.lengths), strict=True))
    encoded = model.encode(batch)
    expected = {
        "encoded": encoded.values,
        "ctc_log_probs": model.ctc_logits(encoded.values).log_softmax(-1),
        "encoder_projected": model.transducer.encoder_projection(encoded.values),
    }
    assert result["encoded_lengths"].tolist() == list(encoded.layout.lengths)
    for name, rows in expected.items():
        real = [item[:n] for item, n in zip(result[name], encoded.layout.lengths, strict=True)]
        torch.testing.assert_close(torch.cat(real), rows, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "config",
    [
        LSTM,
        dataclasses.replace(STATELESS, durations=(0, 1, 2)),
        dataclasses.replace(STATELESS, context=1, activation="tanh"),
        dataclasses.replace(STATELESS, context=4),
    ],
)
@torch.no_grad()
def test_the_steps_of_a_transducer(config, tiny_config):
    torch.manual_seed(0)
    model = ASRModel(dataclasses.replace(tiny_config, transducer=config), VOCABULARY).eval()
    shake(model)
    head = model.transducer
    predictor, joint = predictor_step(head), JointStep(head)
    expected, after = head.begin(3)
    tokens = torch.full((3,), head.blank_id)
    states = [state.begin(3) for state in predictor.states]
    for frame in torch.randn(6, 3, config.joint):
        result, *states = predictor(tokens, *states)
        torch.testing.assert_close(result, expected)
        for mine, theirs in zip(in_model_layout(tuple(states)), after, strict=False):
            torch.testing.assert_close(mine, theirs)
        scores = joint(frame, result)
        assert len(scores) == 1 + (config.durations is not None)
        torch.testing.assert_close(torch.cat(scores, -1), head.logits(frame, expected))
        tokens = torch.randint(VOCABULARY, (3,))
        expected, after = head.step(tokens, after)


def compare_steps(model, run, tolerance):
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
        result = run({"features": features, **counts, **caches})
        assert list(result) == step.outputs
        caches = {name: result[name.replace("cache", "next")] for name in CACHES}
        heads = {
            "encoded": expected,
            "ctc_log_probs": model.ctc_logits(expected).log_softmax(-1),
            "encoder_projected": model.transducer.encoder_projection(expected),
        }
        for name, value in heads.items():
            for slot, count in enumerate(frames):
                torch.testing.assert_close(
                    result[name][slot, :count], value[slot, :count], rtol=tolerance, atol=tolerance
                )
    assert caches["cache_frames"].tolist() == [15, 3 + ends]


KINDS = {
    "relative": {"conv_norm": "batch_norm", "causal_subsampling": False},
    "causal": {"subsampling_norm": True},
    "rotary": {
        "position": "rotary",
        "subsampling": 4,
        "scale_input": True,
        "causal_subsampling": False,
    },
    "sinusoids": {"position": "none", "input_positions": 1.0, "bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_step_is_that_of_the_encoder(kind):
    model = streaming(LSTM, **KINDS[kind])
    step = StreamingStep(model, CONTEXT).eval()
    compare_steps(model, lambda given: dict(zip(step.outputs, step(**given), strict=True)), 1e-5)


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["causal", "relative"])
@torch.no_grad()
def test_onnxruntime_computes_the_step(kind, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = streaming(LSTM, **KINDS[kind])
    graphs = export_onnx(model, tmp_path, {}, CONTEXT)
    assert graphs == ["encoder_step.onnx", "predictor.onnx", "joint.onnx"]
    check_onnx(model, tmp_path, CONTEXT)
    session = onnxruntime.InferenceSession(tmp_path / graphs[0], providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]

    def run(given):
        arrays = session.run(None, {name: value.numpy() for name, value in given.items()})
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    compare_steps(model, run, 1e-4)
    # The description is of this graph.
    says = json.loads((tmp_path / "onnx.json").read_text())["encoder_step"]
    inputs = {item.name: item for item in session.get_inputs()}
    assert set(inputs) == {*says["inputs"], *says["caches"]}
    assert set(names) == {*says["outputs"], *(item["next"] for item in says["caches"].values())}
    for name, item in says["caches"].items():
        assert inputs[name].shape == item["shape"]
        assert (
            inputs[name].type
            == {"float32": "tensor(float)", "int64": "tensor(int64)"}[item["dtype"]]
        )
    assert np.array_equal(says["context"], {"left": 5, "right": 0, "chunk": 3})


class Graph:
    """A graph whose inputs are known by their order."""

    def __init__(self, path):
        onnxruntime = pytest.importorskip("onnxruntime")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.metadata = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, *values):
        names = [item.name for item in self.session.get_inputs()]
        return self.session.run(None, dict(zip(names, values, strict=True)))


def search(folder, mel, rows):
    """Greedy search of one utterance by the three graphs: mel (1, bins, T)."""
    encoder, decoder, joiner = (
        Graph(folder / f"{name}.onnx") for name in ("encoder", "decoder", "joiner")
    )
    blank = int(encoder.metadata["vocab_size"])
    lasting = "tdt" in encoder.metadata["url"]
    sizes = int(encoder.metadata["pred_rnn_layers"]), 1, int(encoder.metadata["pred_hidden"])
    encoded, lengths = encoder(mel, rows)

    def read(token, *states):
        targets = np.array([[token]], np.int32), np.array([1], np.int32)
        predicted, _, *after = decoder(*targets, *states)
        return predicted, after

    predicted, states = read(blank, *np.zeros((2, *sizes), np.float32))
    frame, message, tokens = 0, 0, list[int]()
    while frame < lengths[0]:
        (scores,) = joiner(encoded[:, :, frame : frame + 1], predicted)
        scores = scores[0, 0, 0]
        token = int(scores[: blank + 1].argmax())
        skip = int(scores[blank + 1 :].argmax()) if lasting else int(token == blank)
        if token != blank:
            tokens.append(token)
            message += 1
            predicted, states = read(token, *states)
        if token == blank or message == 10:
            skip = max(skip, 1)
        message = 0 if skip else message
        frame += skip
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("head", [LSTM, TDT], ids=["lstm", "stateless tdt"])
@pytest.mark.extended
@torch.no_grad()
def test_a_search_by_the_graphs_finds_the_same(head, tmp_path):
    pytest.importorskip("onnxscript")
    model = make(head, ctc=head is LSTM)
    graphs = export_sherpa(model, tmp_path, PIECES)
    audio = 0.1 * np.random.default_rng(0).standard_normal(31_000).astype(np.float32)
    example = Example(id="one", audio=audio, prompt=[7], text=[], monotonic=True)
    batch = collate([example], eos_id=3, pad_id=2, framing=model.config.features.framing)
    mel = model.features(batch.audio, batch.frames)
    rows = mel.lengths[:1].numpy()
    features = mel.values[None, : rows[0]].mT.contiguous().numpy()
    encoded = model.encode(batch)
    expected = transducer_greedy(model.transducer, encoded, 10)[0]
    assert search(tmp_path, features, rows) == expected
    assert len(set(expected)) > 1
    if model.ctc_head is not None:
        assert graphs == ["model.onnx", "encoder.onnx", "decoder.onnx", "joiner.onnx"]
        graph = Graph(tmp_path / "model.onnx")
        (log_probs,) = graph(features, rows)
        best = log_probs[0].argmax(-1)
        result = [
            int(b) for a, b in zip([-1, *best], best, strict=False) if b not in (a, VOCABULARY)
        ]
        assert result == ctc_greedy(model, encoded, VOCABULARY)[0]
        assert graph.metadata["subsampling_factor"] == "8"
        assert graph.metadata["normalize_type"] == "per_feature"
    lines = (tmp_path / "tokens.txt").read_text().splitlines()
    assert lines == [*(f"▁{n} {n}" for n in range(VOCABULARY)), f"{BLANK} {VOCABULARY}"]


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_step_for_sherpa_is_that_of_the_encoder(causal):
    """The second stream begins a chunk later, in the same batch."""
    model = streaming(causal_subsampling=causal)
    steps = {
        name: SherpaStep(model, CONTEXT, name) for name in ("ctc_log_probs", "encoder_projected")
    }
    encoder = StreamingEncoder(model.encoder, BINS, 2, CONTEXT)
    draw, rows = torch.Generator().manual_seed(1), 8 * CONTEXT.chunk
    for name, step in steps.items():
        for slot in range(2):
            encoder.start(slot)
        caches = tuple(step.begin(1).values())
        for number in range(4):
            count = min(number + 1, 2)
            if number == 1:
                new = step.begin(1).values()
                caches = tuple(torch.cat(pair) for pair in zip(caches, new, strict=True))
            mel = torch.randn(2, rows, 16, generator=draw)
            lengths = [rows, rows * (count - 1)]
            encoded = encoder.step(mel, lengths, [CONTEXT.chunk, CONTEXT.chunk * (count - 1)])
            result, frames, *caches = step(mel[:count].mT, torch.full((count,), rows), *caches)
            expected = (
                model.ctc_logits(encoded).log_softmax(-1)
                if name == "ctc_log_probs"
                else model.transducer.encoder_projection(encoded).mT
            )
            torch.testing.assert_close(result, expected[:count], rtol=1e-5, atol=1e-5)
            assert frames.tolist() == [CONTEXT.chunk] * count


UNEVEN = dataclasses.replace(TDT, durations=(0, 1, 2, 4))
WITH_CONTEXT, UNCAUSAL = {"context": (CONTEXT,)}, {"causal_convolution": False}


@pytest.mark.parametrize(
    ("export", "build", "model", "options", "message"),
    [
        (export_sherpa, make, {"head": UNEVEN}, (PIECES,), r"`transducer\.durations` must be 0, 1"),
        (export_sherpa, make, {"features": {"hop": 200}}, (PIECES,), r"hop` must be 160 for"),
        (
            export_sherpa,
            make,
            {"features": {"preemphasis": 0.0}},
            (PIECES,),
            r"must be 0\.97 for s",
        ),
        (
            export_sherpa,
            make,
            {},
            (["a b", *PIECES[1:]],),
            "`pieces` must be 40 texts without white",
        ),
        (export_sherpa, make, {}, (PIECES, CONTEXT), r"`features\.normalize` must be false"),
        (export_sherpa, make, WITH_CONTEXT, (PIECES,), r"utterances has no encoder\.context"),
        (export_onnx, make, WITH_CONTEXT, ({},), r"encoder\.context"),
        (export_sherpa, streaming, {"head": TDT}, (PIECES, CONTEXT), r"durations` must be null"),
        (export_onnx, streaming, UNCAUSAL, ({}, CONTEXT), r"causal_convolution` must be true"),
        (export_onnx, streaming, {}, ({}, Context(5, 1, 3)), r"`context\.right` must be 0 to dec"),
    ],
)
def test_what_the_graphs_of_a_format_cannot_do_is_refused(
    export, build, model, options, message, tmp_path
):
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=message):
        export(build(**model), tmp_path, *options)
    assert not list(tmp_path.iterdir())
