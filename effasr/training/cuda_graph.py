"""A micro-batch as one CUDA graph: what forbids it, recording and replay."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerEncoder
from effasr.training.config import TrainConfig
from effasr_kernels import Context
from effasr_kernels.packed import PackedLayout, TileCounts
from effasr_kernels.runtime.counters import graph_counters

_WARM_UPS = 3
"""Runs before the recording, in which libraries choose algorithms and allocate workspaces."""

_SPARE_TILES = 1 / 8
"""Share of tiles that a recording has programs for, beyond those of the batch that it is made with.
A batch with more is recorded anew."""

UNSPLITTABLE_REASON = (
    "a micro-batch in a CUDA graph cannot be split: lower data.frame_budget, or set "
    "training.cuda_graph=false"
)

Outputs = tuple[Tensor, ...]
_Key = tuple[bool, Context | None]
Run = Callable[..., Outputs]
"""Takes a batch and counts, and ``replace``; see `MicroBatchGraph`."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why micro-batches cannot be recorded."""

    # The field that it comes from; ``training.device`` for the device.
    setting: str
    # In a few words.
    reason: str
    # The error where a graph is requested nevertheless.
    message: str


def uses_graph(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a run on a device records its micro-batches."""
    if config.training.cuda_graph == "auto":
        return not obstacles(config, device)
    # Where the request cannot be met, `resolve` or `build` raises.
    return config.training.cuda_graph


def obstacles(config: TrainConfig, device: torch.device) -> list[Obstacle]:
    return [
        *obstacles_of_strategy(config),
        *obstacles_of_batches(config),
        *obstacles_of_model(config.model, device),
    ]


def missed(config: TrainConfig, device: torch.device) -> str | None:
    """Return why a run on a GPU launches its kernels one by one though nobody asked for that."""
    against = obstacles(config, device)
    if device.type != "cuda" or config.training.cuda_graph != "auto" or not against:
        return None
    reasons = "; ".join(f"{x.setting}: {x.reason}" for x in against)
    return (
        f"micro-batches are not recorded as CUDA graphs ({reasons}), so the host launches each "
        "kernel: on an H200 steps of 0.2 to 1 billion weights take 3 to 7 times as long"
    )


def raise_first(found: Iterable[Obstacle]) -> None:
    for obstacle in found:
        raise ValueError(obstacle.message)


def obstacles_of_strategy(config: TrainConfig) -> Iterator[Obstacle]:
    if config.training.strategy == "fsdp2":
        yield Obstacle(
            "training.strategy",
            "fsdp2 gathers parameters during the forward, which a graph cannot record",
            "`training.cuda_graph` must be false with training.strategy fsdp2, whose all-gather of "
            "parameters it cannot record, but is true: set it to false, or use ddp.",
        )


def obstacles_of_batches(config: TrainConfig) -> Iterator[Obstacle]:
    """Yield the obstacles of batches without a static shape, and of recomputed layers."""
    training, data = config.training, config.data
    if training.activation_checkpointing:
        yield Obstacle(
            "training.activation_checkpointing",
            "the random numbers of a layer cannot be rewound while a graph is recorded",
            "`training.activation_checkpointing` must be false with training.cuda_graph, because "
            "the random numbers of a layer cannot be rewound while a graph is recorded, but is "
            f"{training.activation_checkpointing}: set either to false.",
        )
    if data.strategy != "packed":
        yield Obstacle(
            "data.strategy",
            f"batches of {data.strategy} have a shape each",
            f"`training.cuda_graph` must be false for `data.strategy` = {data.strategy}, "
            "whose batches have a shape each, but is true: set it to false, or train with "
            "strategy packed.",
        )


def obstacles_of_model(model: ModelConfig, device: torch.device) -> Iterator[Obstacle]:
    language_model = model.language_model
    if (
        device.type == "cuda"
        and language_model is not None
        and language_model.architecture is not None
    ):
        # Imported here, because transformers takes seconds.
        from effasr.model.language_model.architecture import host_read, is_encoder_decoder

        if (value := host_read(language_model.architecture)) is not None:
            reason = f"transformers' modules read a value from the GPU ({value})"
            if is_encoder_decoder(language_model.architecture):
                reason = value
            yield Obstacle(
                "model.language_model",
                reason,
                f"`training.cuda_graph` must be false for this language model, because {reason}, "
                "but is true: set it to false, or choose another language model.",
            )
    if device.type != "cuda":
        yield Obstacle(
            "training.device",
            f"the run is on {device.type}, and graphs need a GPU",
            f"`training.cuda_graph` needs a GPU, but the run is on {device.type}: set it to false.",
        )


def check_recordable(model: ModelConfig, device: torch.device) -> None:
    raise_first(obstacles_of_model(model, device))


class MicroBatchGraph:
    """Calls a function on batches of one static shape by replaying a recording of the first call.

    Text-only batches have a shape and recordings of their own.

    The function computes a forward and a backward: gradients accumulate in the ``grad`` of the
    parameters, which must stay at its address (``zero_grad(set_to_none=False)``). The function may
    neither synchronise with the host nor depend on a length that the host knows. It adds to the
    gradients of ``parameters`` and may change ``buffers``. Random numbers follow the seed of the
    device's generator at each replay. A call with ``replace`` has a recording of its own, of the
    function with this argument, which may replace gradients where another adds to them; so has each
    context of the attention of ``encoder``, of which each step draws one. Recordings are made anew
    for a batch with more tiles than they have programs for, see `TileCounts`.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor],
        capture: Callable[[Callable[[], Outputs]], tuple[Callable[[], Any], Outputs]] | None = None,
        encoder: FastConformerEncoder | None = None,
    ) -> None:
        self._run = run
        self._device = device
        self._parameters = list(parameters)
        self._buffers = list(buffers)
        # Records a function without running it; returns its replay and its outputs.
        if capture is None:
            # Recordings never run at once, so that they share the memory of activations.
            pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
            capture = partial(_capture, pool=pool)
        self._capture = capture
        self._encoder = encoder
        # Replays and outputs of the recordings, by ``replace`` and context.
        self._recorded: dict[_Key, tuple[Callable[[], Any], Outputs]] = {}
        # Those that the next one takes the place of: without any, PyTorch gives up their pool, and
        # refuses it to the next if a module still has a tensor there.
        self._outdated: dict[_Key, tuple[Callable[[], Any], Outputs]] = {}
        # The tiles of frames and tokens that the recordings have programs for.
        self._tile_counts: list[TileCounts] = []
        self._of_text: MicroBatchGraph | None = None
        self._reads_text = False

    def __call__(self, batch: Batch, counts: Tensor, *, replace: bool = False) -> Outputs:
        """Run the function on a batch, which may be on the host."""
        if batch.source is not None and not self._reads_text:
            if self._of_text is None:
                parts = self._parameters, self._buffers, self._capture, self._encoder
                self._of_text = MicroBatchGraph(self._run, self._device, *parts)
                self._of_text._reads_text = True
            return self._of_text(batch, counts, replace=replace)
        if not self._tile_counts:
            self._prepare(batch, counts)
        if any([x.admit(new) for x, new in zip(self._tile_counts, _layouts(batch), strict=True)]):
            self._outdated, self._recorded = self._recorded, {}
        key = replace, None if self._encoder is None else self._encoder.context
        if key not in self._recorded:
            run = partial(self._on_static_inputs, replace=replace)
            self._recorded[key] = self._capture(run)
            self._outdated = {}
        self._load(batch, counts)
        replay, outputs = self._recorded[key]
        replay()
        # The next replay overwrites the outputs of the recording.
        return tuple(output.clone() for output in outputs)

    def _prepare(self, batch: Batch, counts: Tensor) -> None:
        self._batch, self._counts = batch.to(self._device).rewritable(), counts.clone()
        self._tile_counts = [TileCounts(layout, _SPARE_TILES) for layout in _layouts(batch)]
        for static, bounds in zip(_layouts(self._batch), self._tile_counts, strict=True):
            static.keep_to(bounds)
        saved = [buffer.clone() for buffer in self._buffers]
        # Of a step whose earlier micro-batches were of the other kind.
        grads = [None if x.grad is None else x.grad.clone() for x in self._parameters]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._warm_up_all()
            for buffer, value in zip(self._buffers, saved, strict=True):
                buffer.copy_(value)
            for parameter, grad in zip(self._parameters, grads, strict=True):
                if parameter.grad is not None and grad is not None:
                    parameter.grad.copy_(grad)
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def _on_static_inputs(self, *, replace: bool = False) -> Outputs:
        return self._run(self._batch, self._counts, replace=replace)

    def _warm_up_all(self) -> None:
        """Warm up with each context, as no kernel may be compiled while one is recorded."""
        if self._encoder is None:
            self._warm_up()
            return
        drawn = self._encoder.context
        for context in self._encoder.config.context:
            self._encoder.train_with(context)
            self._warm_up()
        self._encoder.train_with(drawn)

    def _warm_up(self) -> None:
        if self._device.type != "cuda":
            self._on_static_inputs()
            return
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for number in range(_WARM_UPS):
                self._on_static_inputs(replace=number + 1 == _WARM_UPS)
        current.wait_stream(side)

    def _load(self, batch: Batch, counts: Tensor) -> None:
        for static, new in zip(self._batch.tensors(), batch.tensors(), strict=True):
            if static.shape != new.shape:
                raise ValueError(
                    f"`batch` must have the static shape of the first, {tuple(static.shape)}, but "
                    f"has {tuple(new.shape)}: set training.cuda_graph=false."
                )
            static.copy_(new, non_blocking=True)
        self._counts.copy_(counts)


def _layouts(batch: Batch) -> tuple[PackedLayout, ...]:
    return batch.frames, batch.tokens.layout


def _capture(run: Callable[[], Outputs], pool: Any) -> tuple[Callable[[], Any], Outputs]:
    graph = torch.cuda.CUDAGraph()
    # Other threads meanwhile pin memory, copy checkpoints and watch NCCL, which would invalidate a
    # recording that covers all threads.
    options: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
    with torch.cuda.graph(graph, **options), graph_counters():
        outputs = run()
    return graph.replay, outputs
