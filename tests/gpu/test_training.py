"""Training through the kernels: as the references do it, in one shape, and as a CUDA graph."""

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from effasr.data.features import log_mel
from effasr.model.transducer import TransducerConfig
from effasr.training.cuda_graph import MicroBatchGraph
from effasr.training.loss import LOSSES
from effasr.training.step import TrainState, run_micro_batch, train_step
from effasr.training.strategies.weight_copies import WeightCopies
from effasr_kernels import OPERATIONS, TorchOp
from effasr_kernels.runtime import launch
from effasr_kernels.runtime.dispatch import Backend, load
from tests.gpu.small_training import SHAPE, make_batch, make_text_batch, make_train_state


def losses(train_state: TrainState, steps: int = 2) -> list[float]:
    """Loss, cross-entropy, CTC, penalty and norm of the gradient of each step."""
    reports = [train_step(train_state, [make_batch(step)], step) for step in range(steps)]
    return [x for report in reports for x in report.read().values()]


@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.representative(position="rotary")
def test_two_steps_give_the_losses_of_the_references(
    device: torch.device, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: set[tuple[str, bool]] = set()
    select = TorchOp.select

    def watched(self: TorchOp, *args: Any) -> Any:
        implementation = select(self, *args)
        served.add((self.name, implementation is load(self.backends[Backend.TRITON])))
        return implementation

    with monkeypatch.context() as patch:
        patch.setattr(TorchOp, "select", watched)
        # A CPU, such as that of the emulator, has a way of its own to windows.
        patch.setattr(log_mel, "_runs_on_host", lambda *layouts: False)
        found = losses(make_train_state(device, position))
    decoding = {"decode_attention", "append_to_pages", "projected_top_k"}
    of_others = {"transducer_loss", "grouped_linear", "mask_features", "best_alignment_loss"}
    of_language_models = {"rms_norm", "gated_activation"}
    used = set(OPERATIONS) - of_others - of_language_models - decoding
    assert served == {(name, True) for name in used}
    with monkeypatch.context() as patch:
        # As on a machine without a GPU, interpreter or emulator.
        patch.setattr(launch, "INTERPRETED", False)
        with launch.diverted(None):
            expected = losses(make_train_state(torch.device("cpu"), position))
    np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.skipif(launch.INTERPRETED, reason="Triton's interpreter computes bfloat16 wrongly")
@pytest.mark.parametrize("durations", [None, (0, 1, 2)], ids=["decoder", "transducer"])
@pytest.mark.representative(durations=(0, 1, 2))
@pytest.mark.extended
def test_two_steps_in_bfloat16(device: torch.device, durations: tuple[int, ...] | None) -> None:
    transducer = None
    if durations is not None:
        transducer = TransducerConfig(width=32, joint=32, durations=durations, sigma=0.02)
    make = partial(make_train_state, position="relative", transducer=transducer, half=True)
    found = losses(make(device))
    with launch.diverted(None):
        expected = losses(make(torch.device("cpu")))
    np.testing.assert_allclose(found, expected, rtol=3e-2)


@pytest.mark.skipif(launch.INTERPRETED, reason="Triton's interpreter computes bfloat16 wrongly")
@pytest.mark.parametrize("kinds", ["ss ss", "st ts", "t s"])
@pytest.mark.extended
def test_a_recording_replaces_gradients(device: torch.device, kinds: str) -> None:
    """The first micro-batch of a step does not read those of the step before.

    ``kinds``: speech or text, for each micro-batch of each step.
    """

    def capture(run):
        outputs = [x.clone() for x in expected_outputs]

        def replay():
            for output, value in zip(outputs, run(), strict=True):
                output.copy_(value)

        return replay, tuple(outputs)

    shapes = len(LOSSES), SHAPE.max_sequences
    expected_outputs = tuple(torch.zeros(shape, device=device) for shape in shapes)
    averages = []
    for is_recorded in (False, True):
        state = make_train_state(device, "relative", half=True, text="t" in kinds)
        model = state.model
        # So that differences of rounding do not grow.
        config = replace(state.config, learning_rate=lambda step: 0.0)
        state = replace(state, config=config, weights=WeightCopies(model, accumulate=True))
        if is_recorded:
            run = partial(run_micro_batch, state)
            graph = MicroBatchGraph(run, device, model.parameters(), model.buffers(), capture)
            state = replace(state, graph=graph)
        for step, of_step in enumerate(kinds.split()):
            makes = [make_batch if kind == "s" else make_text_batch for kind in of_step]
            batches = [make(2 * step + number) for number, make in enumerate(makes)]
            train_step(state, batches, step)
        averages.append([row["exp_avg"] for row in state.optimizer.state.values()])
    assert state.weights is not None
    # All but those of norms, biases, convolutions and tables.
    assert len(state.weights.replaced) >= 12
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-7)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A device that can record graphs and count its memory."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


def test_a_cuda_graph_replays_the_same_steps(gpu: torch.device) -> None:
    expected = losses(make_train_state(gpu, "relative", dropout=0.1), 6)
    train_state = make_train_state(gpu, "relative", dropout=0.1)
    model = train_state.model
    graph = MicroBatchGraph(
        partial(run_micro_batch, train_state), gpu, model.parameters(), model.buffers()
    )
    found = losses(replace(train_state, graph=graph), 6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_host_does_not_wait_for_a_step(gpu: torch.device, is_recorded: bool) -> None:
    state = make_train_state(gpu, "relative", dropout=0.1)
    if is_recorded:
        run, model = partial(run_micro_batch, state), state.model
        graph = MicroBatchGraph(run, gpu, model.parameters(), model.buffers())
        state = replace(state, graph=graph)
    batches = [make_batch(step).pin_memory() for step in range(4)]
    for step, batch in enumerate(batches):
        # The first step makes the optimizer's state, and the recording.
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            train_step(state, [batch], step)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_stays_what_the_second_step_takes(gpu: torch.device) -> None:
    # What other tests left behind must not go while this one counts.
    gc.collect()
    train_state = make_train_state(gpu, "relative")
    peaks = []
    for step in range(50):
        torch.cuda.reset_peak_memory_stats()
        train_step(train_state, [make_batch(step)], step)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    # The first step makes the optimizer's state.
    assert set(peaks[2:]) == {peaks[1]}


# What the compiler advises about the GPU, such as TF32.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["decoder", "texts", "transducer"])
def test_a_compiled_model_trains_alike(gpu: torch.device, kind: str) -> None:
    torch._dynamo.reset()
    transducer = TransducerConfig(width=32, joint=32) if kind == "transducer" else None
    found: list[list[float]] = []
    for is_compiled in (False, True):
        state = make_train_state(gpu, "relative", transducer=transducer, text=kind == "texts")
        if is_compiled:
            state.model.compile(fullgraph=True, dynamic=False)
        found.append([])
        for step in range(4):
            batches = [make_batch(step), *([make_text_batch(step)] if kind == "texts" else ())]
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                found[-1] += train_step(state, batches, step).read().values()
    np.testing.assert_allclose(*found, rtol=1e-3)
