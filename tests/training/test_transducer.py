"""Searches of a trained transducer, and its step on a device of which the host reads nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from effasr.cli.main import main
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.training.loss import LossConfig
from effasr.training.trainer import run
from tests.support import preloaded

HEADS = {
    "lstm": TransducerConfig(width=12, joint=12, dropout=0.1),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=12, dropout=0.1),
}


@pytest.fixture(params=HEADS)
def hybrid(request, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, decoder=None, ctc=True, transducer=HEADS[request.param])


@pytest.mark.representative(hybrid="lstm")
def test_each_search_decodes_a_run(make_config, tmp_path, hybrid, tones, capsys):
    assert run(make_config(model=hybrid, loss=LossConfig(), training={"max_steps": 2})) == 0
    command = ["--run", str(tmp_path / "run"), "--manifest", str(tones / "test.jsonl")]
    for options in ([], ["--beam", "2"], ["--method", "ctc"]):
        assert main(["evaluate", *command, *options]) == 0
    assert "WER" in capsys.readouterr().out
    assert main(["transcribe", *command[:2], str(tones / "test-0.wav")]) == 0


WORKER = Path(__file__).with_name("fake_gpu_transducer_worker.py")


@pytest.mark.extended
def test_the_host_reads_nothing_and_every_batch_launches_the_same():
    # In a process of its own: torch can be told of one more device only once, and for good.
    done = preloaded.finished(WORKER, limit_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["rnnt", "tdt", "demo"]
