"""`effasr export --format onnx` of a transducer: graphs that are checked, and their description."""

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch

from effasr.checkpoint import save_model
from effasr.cli.main import main
from effasr.data.tokenizer import load_tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.interop.onnx.description import describe
from effasr.interop.onnx.export import check_transducer, write_transducer
from effasr.interop.onnx.plain_model import PaddedEncoder
from effasr.model.transducer import TransducerConfig
from tests.support.recognition import make_model

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

pytestmark = [pytest.mark.slow, pytest.mark.extended]

RNNT = TransducerConfig(predictor="lstm", width=24, layers=2, joint=16, activation="tanh")
STATELESS = replace(RNNT, predictor="stateless", context=3)
KINDS = {
    "lstm": RNNT,
    "lstm tdt": replace(RNNT, layers=1, durations=(0, 1, 2, 3)),
    "stateless": STATELESS,
    "stateless tdt": replace(STATELESS, context=1, durations=(0, 1, 2, 4), activation="relu"),
}


@pytest.fixture(scope="module")
def tokenizer(workplace):
    return load_tokenizer(workplace.folder / "tokenizer")


@pytest.fixture(scope="module", params=KINDS)
def case(request, tokenizer, tmp_path_factory):
    """A transducer alone, and the folder of its graphs; the command writes those of the first."""
    encoder, folder = {"position": "rotary"}, tmp_path_factory.mktemp("transducer")
    model = make_model(tokenizer.vocab_size, encoder=encoder, transducer=KINDS[request.param])
    if request.param != "lstm":
        write_transducer(model.transducer, folder)
        texts = {"max_symbols": DecodingConfig().max_symbols}
        describe(model, folder, PaddedEncoder(model).outputs, texts)
        return model, folder
    save_model(folder / "model", model, tokenizer)
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
    return model, out


def test_the_description_says_what_is_needed(case):
    model, folder = case
    config, says = model.transducer.config, json.loads((folder / "onnx.json").read_text())
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
