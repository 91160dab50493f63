"""The memory of a process does not grow with the number of different batch lengths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STEPS = """
import ctypes
import sys

import torch

from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.transcription.cpu_weights import OneDNNWeights

torch.set_num_threads(1)
torch.manual_seed(0)
encoder = FastConformerConfig(width=32, layers=1, heads=2, feed_forward=32, subsampling_channels=4)
config = ModelConfig(features=FeatureConfig(mel_bins=16), encoder=encoder, decoder=None, ctc=True)
model = ASRModel(config, 20).train(sys.argv[1] == "train")
packed = OneDNNWeights(model)


def step(number: int) -> None:
    audio = torch.randn(8000 + 640 * number).numpy()
    example = Example(id="x", audio=audio, prompt=[3], text=[3], monotonic=False)
    batch = collate([example], eos_id=1, pad_id=0, framing=config.features.framing)
    if model.training:
        model.encode(batch).values.sum().backward()
    else:
        with torch.no_grad(), packed.active():
            model.ctc_head(model.encode(batch).values)


def resident() -> int:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


# The longest comes first: what it needs is not growth.
for number in (399, *range(100)):
    step(number)
before = resident()
for number in range(100, 400):
    step(number)
print((resident() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.extended
def test_300_lengths_more_take_no_more_memory(mode):
    """Unlimited, training grows by 15 MB and evaluation by 180 MB."""
    unset = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", STEPS, mode], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 10
