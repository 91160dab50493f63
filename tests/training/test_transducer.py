"""A transducer is trained, stopped, resumed and validated like any model."""

from dataclasses import replace

import pytest
import torch

from effasr.cli.main import main
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.training.loss import LossConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from tests.training.test_exactness import assert_same_end
from tests.training.test_static import Sizes, make_batch

HEADS = {
    "lstm": TransducerConfig(width=12, joint=12, dropout=0.1),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=12, dropout=0.1),
}


@pytest.fixture(params=HEADS)
def hybrid(request, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, decoder=None, ctc=True, transducer=HEADS[request.param])


@pytest.mark.usefixtures("eager_compiler", "without_onednn")
@pytest.mark.representative(hybrid="lstm")
@pytest.mark.extended
def test_the_model_compiles_once_and_without_a_break(hybrid: ModelConfig) -> None:
    assert hybrid.transducer is not None
    quiet = replace(
        hybrid,
        spec_augment=SpecAugmentConfig(),
        encoder=replace(hybrid.encoder, residual_dropout=0.0, attention_dropout=0.0),
        transducer=replace(hybrid.transducer, dropout=0.0),
    )
    torch.manual_seed(0)
    model = ASRModel(quiet, 12).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    for seed in range(3):
        batch = make_batch(seed)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                losses = call(batch)
                (losses.transducer + losses.ctc).backward()
            # Batch norm cancels the bias in front of it, whose gradient is rounding alone.
            gradients = [
                x.grad.clone()
                for name, x in model.named_parameters()
                if x.grad is not None and not name.endswith("conv.depthwise.bias")
            ]
            results.append([losses.transducer, losses.ctc, *gradients])
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_predictor_asks_for_the_same_memory_at_every_step(hybrid: ModelConfig) -> None:
    model = ASRModel(hybrid, 12).train()
    assert model.transducer is not None
    traces = []
    for seed in range(3):
        text = make_batch(seed).text
        with Sizes() as sizes:
            model.transducer.predictor(text.values, text.layout).sum().backward()
        traces.append(sizes.found)
    assert len(traces[1]) > 20
    assert traces[2] == traces[1]


def test_steps_are_finite_and_bring_the_loss_down(make_train_state, hybrid, batches) -> None:
    _, train_state = make_train_state(model=hybrid)
    first, *later = [train_step(train_state, batches[:2], step).read() for step in range(30)]
    weighted = 0.3 * first["ctc"] + 0.7 * first["transducer"]
    assert first["loss"] == pytest.approx(weighted, rel=1e-5)
    assert first["cross_entropy"] == first["guided"] == 0
    assert all(figures["finite"] for figures in (first, *later))
    assert later[-1]["transducer"] < first["transducer"]


@pytest.mark.representative(hybrid="lstm")
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    make_config, tmp_path, hybrid, tones, capsys
) -> None:
    data = {"validation": str(tones / "test.jsonl")}
    settings = {"model": hybrid, "loss": LossConfig(), "data": data}
    assert run(make_config(name="straight", **settings)) == 0
    assert run(make_config(name="stopped", training={"stop_at": 5}, **settings)) == 0
    assert run(make_config(name="stopped", **settings)) == 0
    assert_same_end(tmp_path / "straight", tmp_path / "stopped", 12)
    line = read_lines(tmp_path / "straight" / "metrics.jsonl")[-1]
    assert line["loss"] == pytest.approx(0.3 * line["ctc"] + 0.7 * line["transducer"], rel=1e-4)
    capsys.readouterr()
    for options in ([], ["--beam", "2"], ["--method", "ctc"]):
        command = ["--run", str(tmp_path / "straight"), "--manifest", str(tones / "test.jsonl")]
        assert main(["evaluate", *command, *options]) == 0
    assert "WER" in capsys.readouterr().out
    audio = str(tones / "test-0.wav")
    assert main(["transcribe", "--run", str(tmp_path / "straight"), audio]) == 0
