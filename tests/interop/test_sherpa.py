"""Graphs for sherpa-onnx, called as it calls NeMo's: by the order of inputs, sizes by metadata."""

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.interop.onnx.sherpa import BLANK, SherpaStep, export_sherpa
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context
from tests.support.small_model import VOCABULARY, shake

PIECES = [f"▁{number}" for number in range(VOCABULARY)]
HEADS = {
    "lstm": TransducerConfig(width=12, layers=2, joint=10),
    "stateless tdt": TransducerConfig(
        predictor="stateless", context=3, width=12, joint=10, durations=(0, 1, 2, 3)
    ),
}


def make(head, *, ctc=True, **features):
    config = ModelConfig(
        features=FeatureConfig(**{"mel_bins": 16} | features),
        encoder=FastConformerConfig(
            width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4,
            subsampling_norm=True, conv_norm="layer_norm",
        ),
        decoder=None,
        ctc=ctc,
        transducer=head,
    )  # fmt: skip
    torch.manual_seed(2)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    return model


class Graph:
    """A graph whose inputs are known by their order."""

    def __init__(self, path):
        onnxruntime = pytest.importorskip("onnxruntime")
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.metadata = self.session.get_modelmeta().custom_metadata_map

    def __call__(self, *values):
        names = [one.name for one in self.session.get_inputs()]
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
    frame, said, tokens = 0, 0, list[int]()
    while frame < lengths[0]:
        (scores,) = joiner(encoded[:, :, frame : frame + 1], predicted)
        scores = scores[0, 0, 0]
        token = int(scores[: blank + 1].argmax())
        skip = int(scores[blank + 1 :].argmax()) if lasting else int(token == blank)
        if token != blank:
            tokens.append(token)
            said += 1
            predicted, states = read(token, *states)
        if token == blank or said == 10:
            skip = max(skip, 1)
        said = 0 if skip else said
        frame += skip
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.extended
@torch.no_grad()
def test_a_search_by_the_graphs_finds_the_same(kind, tmp_path):
    pytest.importorskip("onnxscript")
    model = make(HEADS[kind], ctc=kind == "lstm")
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
        found = [
            int(b) for a, b in zip([-1, *best], best, strict=False) if b not in (a, VOCABULARY)
        ]
        assert found == ctc_greedy(model, encoded, VOCABULARY)[0]
        assert graph.metadata["subsampling_factor"] == "8"
        assert graph.metadata["normalize_type"] == "per_feature"
    lines = (tmp_path / "tokens.txt").read_text().splitlines()
    assert lines == [*(f"▁{n} {n}" for n in range(VOCABULARY)), f"{BLANK} {VOCABULARY}"]


def test_what_sherpa_cannot_run_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    tdt = TransducerConfig(width=12, joint=10, durations=(0, 1, 2, 4))
    with pytest.raises(ValueError, match=r"`transducer\.durations` must be 0, 1, 2 and so on"):
        export_sherpa(make(tdt), tmp_path, PIECES)
    with pytest.raises(ValueError, match=r"`features\.hop` must be 160 for sherpa-onnx"):
        export_sherpa(make(None, hop=200), tmp_path, PIECES)
    with pytest.raises(ValueError, match=r"`features\.preemphasis` must be 0\.97 for sherpa-onnx"):
        export_sherpa(make(None, preemphasis=0.0), tmp_path, PIECES)
    with pytest.raises(ValueError, match="`pieces` must be 40 texts without white space"):
        export_sherpa(make(None), tmp_path, ["a b", *PIECES[1:]])
    assert not list(tmp_path.iterdir())


CONTEXT = Context(5, 0, 3)


def streaming(*, causal=True, durations=None):
    """A model of streams with the tokens of `PIECES`."""
    head = TransducerConfig(predictor="stateless", width=12, joint=10, durations=durations)
    encoder = FastConformerConfig(
        width=16, layers=2, heads=2, feed_forward=16, subsampling_channels=4, conv_kernel=5,
        conv_norm="layer_norm", causal_convolution=True, causal_subsampling=causal,
        context=(CONTEXT,),
    )  # fmt: skip
    config = ModelConfig(
        features=FeatureConfig(mel_bins=16, normalize=False),
        encoder=encoder,
        decoder=None,
        ctc=True,
        transducer=head,
    )
    torch.manual_seed(3)
    model = ASRModel(config, VOCABULARY).eval()
    shake(model)
    return model


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_step_for_sherpa_is_that_of_the_encoder(causal):
    """The second stream begins a chunk later, in the same batch."""
    model = streaming(causal=causal)
    steps = {
        name: SherpaStep(model, CONTEXT, name) for name in ("ctc_log_probs", "encoder_projected")
    }
    encoder = StreamingEncoder(model.encoder, 16, 2, CONTEXT)
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
            found, frames, *caches = step(mel[:count].mT, torch.full((count,), rows), *caches)
            expected = (
                model.ctc_logits(encoded).log_softmax(-1)
                if name == "ctc_log_probs"
                else model.transducer.encoder_projection(encoded).mT
            )
            torch.testing.assert_close(found, expected[:count], rtol=1e-5, atol=1e-5)
            assert frames.tolist() == [CONTEXT.chunk] * count


def test_what_sherpa_cannot_stream_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=r"`features\.normalize` must be false"):
        export_sherpa(make(None), tmp_path, PIECES, CONTEXT)
    with pytest.raises(ValueError, match=r"`transducer\.durations` must be null"):
        export_sherpa(streaming(durations=(0, 1, 2)), tmp_path, PIECES, CONTEXT)
    assert not list(tmp_path.iterdir())
