"""Steps of decoding on fake tensors of a made-up accelerator: what a CUDA graph could not record.

As for training (tests/model/fake_gpu_worker.py): fake tensors hold no values, so a step that asks
the device for one fails, and so does one that mixes devices or copies between them. What lets
utterances into slots is not recorded, but must not wait either: it copies numbers to the device by
`CacheSizes.integers` alone, from pinned memory.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from fake_gpu_worker import DEVICE, OneDevice, model_on_device, register, variants

from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.nn.cache.contiguous import CacheSizes
from effasr_kernels import PackedLayout, PackedSequence


def static_tensors(engine: Engine) -> list[int]:
    """What a recorded step reads and writes, by identity."""
    state = engine._state
    result = [engine._tokens, state._positions, state._going]
    for cache in (state.self_cache, state.cross_cache):
        result += [cache.pages, cache.table, cache.lengths]
    return [id(x) for x in result]


def check_admission(engine: Engine) -> None:
    """Let those in that wait; what `CacheSizes.integers` copies is there already."""

    def integers(self, values, dtype=torch.int64) -> torch.Tensor:
        shape = torch.tensor(values).shape
        return torch.empty(shape, dtype=dtype, device=self.device)

    copying, CacheSizes.integers = CacheSizes.integers, integers
    try:
        with OneDevice():
            engine._fill_slots()
    finally:
        CacheSizes.integers = copying


def check_steps(config, dtype: torch.dtype) -> None:
    # The last layer does not finish what it reads before the first step: there must be another.
    config = replace(config, decoder=replace(config.decoder, layers=2))
    mode = FakeTensorMode()
    model = model_on_device(config, mode, dtype).eval()
    with mode:
        engine = Engine(model, 3, slots=5, max_frames=40)
        values = torch.empty(60, 32, dtype=dtype, device=DEVICE)
        bounds = (0, 40, 43, 60)
        on_device = torch.tensor(bounds, dtype=torch.int32).to(DEVICE)
        encoded = PackedSequence(values, PackedLayout(on_device, bounds, rows=60))
        engine.submit(encoded, [Utterance(n, [2] * (n + 1), 9) for n in range(3)])
        with engine._computing():
            check_admission(engine)
            before = static_tensors(engine)
            for _ in range(2):
                with OneDevice():
                    likeliest = engine._decode_token()
            assert static_tensors(engine) == before, "a recording would not find them again"
    assert engine._state.paged
    assert (likeliest.shape, likeliest.dtype) == ((8,), torch.int64)
    assert likeliest.device.type == DEVICE


if __name__ == "__main__":
    register()
    for index, config in enumerate(list(variants())[:4]):
        check_steps(config, (torch.float32, torch.bfloat16)[index % 2])
    sys.stdout.write("4 engines\n")
