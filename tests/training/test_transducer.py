"""A transducer is trained, stopped, resumed and validated like any model."""

from dataclasses import replace
from pathlib import Path

import pytest

from effasr.cli.main import main
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.training.loss import LossConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from tests.support import preloaded
from tests.training.test_exactness import assert_same_end

HEADS = {
    "lstm": TransducerConfig(width=12, joint=12, dropout=0.1),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=12, dropout=0.1),
}


@pytest.fixture(params=HEADS)
def hybrid(request, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, decoder=None, ctc=True, transducer=HEADS[request.param])


def test_steps_are_finite_and_bring_the_loss_down(make_train_state, hybrid, batches):
    _, train_state = make_train_state(model=hybrid)
    first, *later = [train_step(train_state, batches[:2], step).read() for step in range(30)]
    weighted = 0.3 * first["ctc"] + 0.7 * first["transducer"]
    assert first["loss"] == pytest.approx(weighted, rel=1e-5)
    assert first["cross_entropy"] == first["guided"] == 0
    assert all(figures["finite"] for figures in (first, *later))
    assert later[-1]["transducer"] < first["transducer"]


@pytest.mark.representative(hybrid="lstm")
def test_a_stopped_run_ends_alike(make_config, tmp_path, hybrid, tones, capsys):
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


WORKER = Path(__file__).with_name("fake_gpu_transducer_worker.py")


@pytest.mark.extended
def test_the_host_reads_nothing_and_every_batch_launches_the_same():
    # In a process of its own: torch can be told of one more device only once, and for good.
    done = preloaded.finished(WORKER, limit_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["rnnt", "tdt", "demo"]
