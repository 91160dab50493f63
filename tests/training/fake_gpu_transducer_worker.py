"""A micro-batch of every kind of transducer on a fake GPU, of which the host reads nothing.

Fake tensors have no values, so whatever asks for one fails; launches are recorded, not run. The
batch is one that a CUDA graph would read: its offsets are only on the device.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[2] / "profiling"))

from census.fake_gpu import NAME, fake_batch, fake_gpu, materialize

from effasr import config as configuration
from effasr.data.batch import Batch, StaticShape
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig
from effasr.training import build
from effasr.training.calibration.workload import batch_of
from effasr.training.config import TrainConfig, resolve_losses
from effasr.training.step import run_micro_batch
from effasr_kernels.runtime.launch import Launch, diverted

VOCABULARY, CAPACITY = 12, 700
MODELS = {
    "rnnt": (None, "stateless", "small"),
    "tdt": ((0, 1, 2), "lstm", "small"),
    "demo": (None, "stateless", "demo_transducer"),
}


class StaysOnDevice(TorchDispatchMode):
    """Refuses copies from the device to the host, and operators whose result has a drawn size."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        kinds = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)]
        assert not (NAME in kinds and "cpu" in made), f"{func} copies to the host"
        into_host = "copy_" in str(func) and kinds[:2] == ["cpu", NAME]
        assert not into_host, f"{func} copies to the host"
        return out


def prepared(name: str, device: torch.device) -> tuple[TrainConfig, ASRModel]:
    durations, predictor, recipe = MODELS[name]
    config = configuration.load(TrainConfig, recipe, ["training.cuda_graph=false"])
    if recipe == "small":
        head = TransducerConfig(predictor=predictor, width=16, joint=32, durations=durations)
        config = replace(config, model=replace(config.model, ctc=True, transducer=head))
    config = replace(config, loss=resolve_losses(config.loss, config.model))
    with torch.device("meta"):
        model = ASRModel(config.model, VOCABULARY).train()
    materialize(model, device)
    return config, model


def planned(config: TrainConfig, lengths: list[tuple[int, int]]) -> Batch:
    framing = config.model.features.framing
    shape = StaticShape(96, 40, 6, 60, 20, framing, CAPACITY)
    return batch_of(lengths, shape, VOCABULARY, 0)


def recorded(name: str, lengths: list[tuple[int, int]]) -> list[tuple[str, tuple[int, ...]]]:
    launches: list[Launch] = []
    with fake_gpu() as device:
        config, model = prepared(name, device)
        state = build.build_train_state(config, model, DistributedContext(0, 1, device))
        counts = torch.ones(16, device=device)
        batch = fake_batch(planned(config, lengths)).to(device).rewritable()
        with diverted(launches.append), StaysOnDevice():
            run_micro_batch(state, batch, counts)
        assert model.transducer is not None
        assert model.transducer.output.weight.grad is not None
    return [(x.kernel.fn.__name__, x.grid) for x in launches]


if __name__ == "__main__":
    for name in MODELS:
        batches = [(30, 8), (12, 12), (40, 5)], [(2, 1)], [(1, 20), (50, 9), (3, 1), (30, 1)]
        first, *others = (recorded(name, list(lengths)) for lengths in batches)
        names = {kernel for kernel, _ in first}
        assert {"divide", "place_nodes", "join", "fold", "finish_states"} <= names, names
        assert all(first == other for other in others), name
        sys.stdout.write(f"{name}: {len(first)} launches\n")
