"""`effasr export --format onnx` of a transducer: searched with numpy and onnxruntime alone."""

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import save_model
from effasr.cli.main import main
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import mel_filterbank
from effasr.data.tokenizer import load_tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.interop.onnx.description import describe
from effasr.interop.onnx.export import check_transducer, write_transducer
from effasr.interop.onnx.plain_model import PaddedEncoder
from effasr.model.transducer import TransducerConfig
from tests.support.recognition import TRANSDUCER_GAINS, make_model

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = [pytest.mark.slow, pytest.mark.extended]

FEATURES = FeatureConfig(mel_bins=16)
RNNT = TransducerConfig(predictor="lstm", width=24, layers=2, joint=16, activation="tanh")
STATELESS = replace(RNNT, predictor="stateless", context=3)
KINDS = {
    "lstm": RNNT,
    "lstm tdt": replace(RNNT, layers=1, durations=(0, 1, 2, 3)),
    "stateless": STATELESS,
    "stateless tdt": replace(STATELESS, context=1, durations=(0, 1, 2, 4), activation="relu"),
}
DRAWN = {"lstm": (1, 5.0), "lstm tdt": (2, 0.0), "stateless": (3, 2.0), "stateless tdt": (4, 1.0)}
"""A seed and the blank's bias by which it is not always a label, nor always the blank."""


class Graphs:
    """Greedy search over a batch as a user of the files would write it, from onnx.json."""

    def __init__(self, folder):
        self.says = json.loads((folder / "onnx.json").read_text())
        self.encoder, self.predictor, self.joint = (
            onnxruntime.InferenceSession(
                folder / self.says[part]["file"], providers=["CPUExecutionProvider"]
            )
            for part in ("encoder", "predictor", "joint")
        )

    def run(self, part, **inputs):
        names = list(self.says[part]["outputs"])
        return dict(zip(names, getattr(self, part).run(names, inputs), strict=True))

    def features(self, audio):
        """By the definition in onnx.json; librosa's mel bands are those of effasr."""
        of = self.says["features"]
        hop, window, remaining = of["hop"], of["window"], of["window"] // 2
        x = np.concatenate([audio[:1], audio[1:] - of["preemphasis"] * audio[:-1]])
        x = np.pad(x, (remaining, window))
        rows = [x[t * hop :][:window] for t in range(len(audio) // hop)]
        power = np.abs(np.fft.rfft(rows * np.hanning(window), of["n_fft"])) ** 2
        log_mel = np.log(power @ mel_filterbank(FEATURES) + 2.0**-24)
        centred = log_mel - log_mel.mean(0)
        return (centred / (log_mel.std(0, ddof=1) + 1e-5)).astype(np.float32)

    def encode(self, features):
        """All at once, with noise behind the shorter ones."""
        lengths = np.array([len(rows) for rows in features])
        shape = len(features), lengths.max(), self.says["features"]["mel_bins"]
        padded = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        for rows, into in zip(features, padded, strict=True):
            into[: len(rows)] = rows
        return self.run("encoder", features=padded, lengths=lengths)

    def read(self, memory, which, tokens):
        """Have the predictor read a token of some utterances; ``memory`` is of all."""
        states = self.says["predictor"]["states"]
        axes = {name: state["shape"].index("batch") for name, state in states.items()}
        inputs = {name: np.take(memory[name], which, axis) for name, axis in axes.items()}
        result = self.run("predictor", tokens=tokens, **inputs)
        memory["predicted"][which] = result["predictor_projected"]
        for name, axis in axes.items():
            value = np.moveaxis(result[states[name]["next"]], axis, 0)
            np.moveaxis(memory[name], axis, 0)[which] = value

    def search(self, encoded):
        """The labels of each utterance; and of all steps whether it was one, and the frames."""
        frames, ends = encoded["encoder_projected"], encoded["encoded_lengths"]
        count, blank = len(ends), self.says["blank_id"]
        memory = {"predicted": np.zeros((count, self.says["joint"]["width"]), np.float32)}
        for name, state in self.says["predictor"]["states"].items():
            shape = [count if size == "batch" else size for size in state["shape"]]
            memory[name] = np.full(shape, state["initial"], state["dtype"])
        self.read(memory, np.arange(count), np.full(count, blank))
        message: list[list[int]] = [[] for _ in ends]
        at, here, steps = np.zeros(count, int), np.zeros(count, int), set()
        while len(active := np.flatnonzero(at < ends)):
            scores = self.run(
                "joint",
                encoder_projected=frames[active, at[active]],
                predictor_projected=memory["predicted"][active],
            )
            symbols, lasts = scores["logits"].argmax(-1), np.zeros(len(active), int)
            if "duration_logits" in scores:
                lasts = np.array(self.says["durations"])[scores["duration_logits"].argmax(-1)]
            is_label = symbols != blank
            here[active] += is_label
            must_go = ~is_label | (here[active] >= self.says["max_symbols"])
            lasts = np.maximum(lasts, must_go)
            at[active] += lasts
            here[active[lasts > 0]] = 0
            steps |= set(zip(is_label.tolist(), lasts.tolist(), strict=True))
            for utterance, label in zip(active[is_label], symbols[is_label], strict=True):
                message[utterance].append(int(label))
            if is_label.any():
                self.read(memory, active[is_label], symbols[is_label])
        return message, steps


@pytest.fixture(scope="module")
def recordings(workplace):
    files = [workplace.folder / f"train-{number}.wav" for number in range(7)]
    audio = [soundfile.read(file, dtype="float32")[0] for file in files]
    return [*audio, audio[0][:1_300]]


@pytest.fixture(scope="module")
def tokenizer(workplace):
    return load_tokenizer(workplace.folder / "tokenizer")


@pytest.fixture(scope="module")
def encoder(tokenizer):
    """A transducer alone, on rotary positions, whose parts but the head are those of all models."""
    return transducer("lstm", tokenizer)


def transducer(kind, tokenizer, encoder=None):
    seed, bias = DRAWN[kind]
    # Attention that looks.
    gains = {"encoder.layers.0.self_attn.qkv_proj.weight": 4.0, **TRANSDUCER_GAINS}
    sizes = {"position": "rotary"}
    model = make_model(
        tokenizer.vocab_size, seed=seed, encoder=sizes, transducer=KINDS[kind], gains=gains
    )
    head = model.transducer
    with torch.no_grad():
        head.output.bias[tokenizer.vocab_size] = bias
    if encoder is not None:
        model.encoder.load_state_dict(encoder.encoder.state_dict())
        projection = encoder.transducer.encoder_projection
        head.encoder_projection.load_state_dict(projection.state_dict())
    return model


@pytest.fixture(scope="module")
def exported(encoder, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transducer")
    save_model(folder / "model", encoder, tokenizer)
    out, message = folder / "onnx", StringIO()
    out.mkdir()
    for earlier in ("onnx.json", "decoder_step.onnx"):
        (out / earlier).touch()
    with redirect_stdout(message):
        assert main(["export", f"{folder}/model", f"{out}", "--format", "onnx"]) == 0
    names = "encoder.onnx, predictor.onnx and joint.onnx"
    assert message.getvalue() == f"{out}: {names}, the same as the model in onnxruntime\n"
    assert {path.name for path in out.glob("*.onnx")} == set(names.replace(" and", ",").split(", "))
    assert load_tokenizer(out).vocab_size == tokenizer.vocab_size
    return out


@pytest.fixture(scope="module", params=KINDS)
def case(request, encoder, tokenizer, exported, tmp_path_factory):
    """A model, and the folder of its graphs; that of the encoder is the same for all."""
    if request.param == "lstm":
        return encoder, exported
    model = transducer(request.param, tokenizer, encoder)
    folder = tmp_path_factory.mktemp("onnx")
    shutil.copy(exported / "encoder.onnx", folder)
    write_transducer(model.transducer, folder)
    texts = {"max_symbols": DecodingConfig().max_symbols}
    describe(model, folder, PaddedEncoder(model).outputs, texts)
    return model, folder


def test_the_search_of_a_stranger_finds_the_same(case, recordings, tokenizer):
    model, folder = case
    batch = collate(
        [Example("x", audio, [0], [], monotonic=True) for audio in recordings], eos_id=0, pad_id=0
    )
    with torch.no_grad():
        mel = model.features(batch.audio, batch.frames)
        packed = model.encode(batch).unpack()
    slots = mel.values.split([8 * len(frames) for frames in packed])
    features = [rows[:n].numpy() for rows, n in zip(slots, mel.lengths.tolist(), strict=True)]
    graphs = Graphs(folder)
    encoded = graphs.encode(features)
    assert encoded["encoded_lengths"].tolist() == [len(frames) for frames in packed]
    for expected, result in zip(packed, encoded["encoded"], strict=True):
        assert result[: len(expected)] == pytest.approx(expected.numpy(), abs=1e-4)

    message, steps = graphs.search(encoded)
    decoded = decode(model, tokenizer, batch, [[0]] * len(recordings), DecodingConfig())
    assert message == [list(hypothesis.tokens) for hypothesis in decoded]
    assert len({tuple(labels) for labels in message}) > 5, "the test needs different texts"
    durations = model.transducer.config.durations or (0, 1)
    assert steps > {(True, frames) for frames in durations}, "the test needs every duration"
    assert any(not is_label for is_label, _ in steps), "the test needs blanks"


def test_the_features_are_those_of_the_definition(exported, encoder, recordings):
    for audio in recordings:
        batch = collate([Example("x", audio, [0], [], monotonic=True)], eos_id=0, pad_id=0)
        mel = encoder.features(batch.audio, batch.frames)
        result = Graphs(exported).features(audio)
        # Bands without sound magnify what is rounded.
        assert result == pytest.approx(mel.values[: int(mel.lengths[0])].numpy(), abs=1e-3)


def test_the_description_says_what_is_needed(case):
    model, folder = case
    config, says = model.transducer.config, Graphs(folder).says
    assert says["blank_id"] == model.vocab_size
    assert says["subsampling_factor"] == 8
    assert says["durations"] == (None if config.durations is None else list(config.durations))
    shapes = [state["shape"] for state in says["predictor"]["states"].values()]
    if config.predictor == "lstm":
        assert shapes == [[config.layers, "batch", config.width]] * 2
    else:
        assert shapes == [["batch", config.context - 1]] * (config.context > 1)


def test_the_graphs_are_checked(case):
    """Weights that are not those of the graphs are told, whichever they are."""
    model, folder = case
    head, frames = model.transducer, torch.randn(2, 4, 16)
    check_transducer(head, folder, frames)
    for part, file in (("predictor", "predictor"), ("output", "joint")):
        weight = next(iter(head.get_submodule(part).parameters()))
        with torch.no_grad():
            weight.mul_(1.1)
            with pytest.raises(ValueError, match=rf"{file}\.onnx: \w+ must be what the model"):
                check_transducer(head, folder, frames)
            weight.div_(1.1)
