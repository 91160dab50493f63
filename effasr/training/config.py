"""Everything that a run depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from effasr import checkpoint
from effasr import config as configuration
from effasr.data.config import DataConfig
from effasr.decoding.config import DecodingConfig
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.delayed_averaging import DelayedConfig
from effasr.distributed.local_sgd import HierarchicalConfig, LocalSGDConfig
from effasr.model.asr import ModelConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.loss import (
    DEFAULT_CTC_WEIGHT,
    DEFAULT_TRANSDUCER_WEIGHT,
    LossConfig,
)
from effasr.training.profiler import ProfileConfig

ASYNCHRONOUS = ("adpsgd", "h_adpsgd")
"""Strategies with learners that do not wait for each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """How long to train, on what, and what to write when.

    Attributes:
        max_steps: Updates of the whole run.
        stop_at: Stop after this step, with a checkpoint, as if asked to by a signal; the run goes
            on from it when it is started again.
        log_every: Steps between two lines of metrics.jsonl.
        validate_every: Steps between two validations; the last step has one, too.
        checkpoint_every: Steps between two checkpoints; the last step has one, too.
        keep: Newest checkpoints to keep; that with the best validation is kept besides.
        async_save: Whether training goes on while a checkpoint is written. It then stops only for
            a copy to the host, whose memory holds weights and moments once more.
        precision: Of matrix products, in the sense of autocast; weights and sums are float32.
            ``auto``: bfloat16 on a GPU, float32 on a CPU.
        clip: Largest norm of the gradient of all weights.
        freeze: Patterns of parameters, or of modules, that are not trained, such as ``encoder`` or
            ``encoder.layers.[0-9].*``: they have neither gradient nor moments, and nothing is
            computed backwards below the first that is trained. Modules without any that is trained
            are in evaluation mode: their batch norms keep their statistics, and use them, and they
            drop nothing. SpecAugment stays.
        ema_decay: Of a running average of the weights, which is what is then validated and
            published; null for none.
        ema_reference_micro_batches: The micro-batches of a step, over all ranks, that ``ema_decay``
            is meant for: with k times as many, an update keeps ``ema_decay ** k``. null: always
            ``ema_decay``.
        on_nan: A loss or gradient that is not finite never reaches the weights. ``stop`` ends the
            run there and names the utterances; ``skip`` lists them in skipped.jsonl.
        restart: Begin anew; what an earlier run of this name wrote is renamed, not removed.
            Otherwise a run goes on from its newest checkpoint.
        device: ``auto``: a GPU where there is one.
        threads: Of PyTorch on the CPU; null leaves PyTorch's choice.
        timeout_s: How long a rank waits for another before it takes it for lost.
        data_timeout_s: How long a rank waits for the data of a step, before it takes the read for
            stuck and ends itself.
        activation_checkpointing: Whether encoder and decoder layers keep only their inputs, and are
            computed again in the backward: less memory for up to a third more work, and the same
            gradients. ``true``: all layers. n: the first of every n.
        compile: Whether torch.compile makes the model's forward and backward, with fsdp2 those of
            its layers; the first step then takes minutes.
        strategy: Of several processes. ``ddp``: each has all weights, and gradients are averaged
            while they are computed. ``fsdp2``: each has a part of the weights, gradients and
            moments, and layers are gathered when they are needed: for models that are too large
            otherwise. With the others, each makes updates of its own, and weights are averaged:
            for slow networks. ``local_sgd``: now and then. ``hierarchical``: often among
            neighbours, seldom among all. ``delayed``: in every step, while the next update is
            computed. ``adpsgd``: each takes work when it has time, and averages with its neighbours
            in the background, so that nobody waits for slow ones, and the run goes on without those
            that are lost. ``h_adpsgd``: so do nodes, within which it is as with ddp. All write the
            same checkpoints, from which a run may go on with another strategy. A single process
            needs none.
        local_sgd: When ``local_sgd`` averages.
        hierarchical: When which ranks average with ``hierarchical``.
        delayed: When ``delayed`` begins to.
        gossip: Who averages with whom with ``adpsgd`` and ``h_adpsgd``.
        cuda_graph: Whether the forward and backward of a micro-batch are recorded once as a CUDA
            graph and replayed, so that the host launches no kernels; needs a GPU. Several ranks
            then exchange gradients after the backward, and not while it computes.
        tensorboard: Whether to write curves for TensorBoard.
        profile: Which steps a profiler records.
    """

    max_steps: int = 100_000
    stop_at: int | None = None
    log_every: int = 50
    validate_every: int = 2000
    checkpoint_every: int = 1000
    keep: int = 3
    async_save: bool = True
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    clip: float = 1.0
    freeze: tuple[str, ...] = ()
    ema_decay: float | None = None
    ema_reference_micro_batches: int | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    restart: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    timeout_s: float = 600.0
    data_timeout_s: float = 300.0
    activation_checkpointing: bool | int = False
    compile: bool = False
    strategy: Literal[
        "ddp", "fsdp2", "local_sgd", "hierarchical", "delayed", "adpsgd", "h_adpsgd"
    ] = "ddp"
    local_sgd: LocalSGDConfig = field(default_factory=LocalSGDConfig)
    hierarchical: HierarchicalConfig = field(default_factory=HierarchicalConfig)
    delayed: DelayedConfig = field(default_factory=DelayedConfig)
    gossip: GossipConfig = field(default_factory=GossipConfig)
    cuda_graph: bool = False
    tensorboard: bool = True
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        for name in ("max_steps", "log_every", "validate_every", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        for name in ("clip", "timeout_s", "data_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` must be positive, but is {getattr(self, name)}.")
        if self.activation_checkpointing < 0:
            raise ValueError(
                "`activation_checkpointing` must be true, false or at least 1, but is "
                f"{self.activation_checkpointing}: 2 stands for every second layer."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"`ema_decay` must lie between 0 and 1, but is {self.ema_decay}.")
        for name in ("stop_at", "threads", "ema_reference_micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1 or null, but is {value}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """How ``data.validation`` is transcribed while the model trains.

    Without such data there is no validation, and no best checkpoint.

    Attributes:
        max_utterances: Only the first so many of each set; null for all.
        normalizer: Of both texts before words are compared; see `effasr evaluate`.
        decoding: How.
    """

    max_utterances: int | None = None
    normalizer: str = "basic"
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        if self.max_utterances is not None and self.max_utterances < 1:
            raise ValueError(
                f"`max_utterances` must be at least 1 or null, but is {self.max_utterances}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A run.

    Attributes:
        name: Of the run; its files are in ``output/name``.
        output: Where runs are.
        seed: Of the weights, the order of the data, dropout and augmentation.
        init_from: A model directory, or a run, to begin with: its weights, its tokenizer and its
            architecture, of which ``model`` changes the fields that a recipe gives.
        lora: Adapters that are trained in place of the weights of ``init_from``; null for none.
        model: The architecture.
        data: The utterances, the tokenizer and the batches.
        loss: Weights of the losses.
        optimizer: AdamW or LAMB.
        schedule: Of the learning rate.
        training: The loop.
        evaluation: Validation.
        calibration: What ``data.frame_budget: auto`` aims at.
    """

    name: str = "run"
    output: str = "runs"
    seed: int = 0
    init_from: str | None = None
    lora: LoRAConfig | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @classmethod
    def inherited(cls, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fill in what ``model`` leaves out by the model of ``init_from``.

        If that is gone, the run itself may have begun, and has it. Without ``init_from``, and where
        ``model`` is not given at all, there is nothing to do: see
        `effasr.training.build.resolve`. If no model can be read, that is said there as well.
        """
        given, source = mapping.get("model"), mapping.get("init_from")
        if not given or not isinstance(given, Mapping) or not isinstance(source, str):
            return mapping
        run = Path(str(mapping.get("output", "runs"))) / str(mapping.get("name", "run"))
        for path in (source, run):
            try:
                model = checkpoint.read_description(checkpoint.resolve(path)).model
            except (checkpoint.CheckpointError, OSError):
                continue
            whole = configuration.merged(configuration.to_mapping(model), given)
            return {**mapping, "model": whole}
        return mapping

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"`name` must be usable as a folder's name, but is {self.name!r}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"`seed` must be at least 0 and fit in 63 bits, but is {self.seed}.")


def resolve_losses(loss: LossConfig, model: ModelConfig) -> LossConfig:
    """Fill in the weights that are left open, and check that the model has every loss.

    Raises:
        ValueError: It has not; the message says what to change.
    """
    if not model.ctc and (loss.ctc_weight or loss.ctc_weight_before or loss.guided_after_ctc):
        raise ValueError(
            "`loss` must not use CTC for a model without CTC head: set model.ctc=true, or "
            "loss.ctc_weight=0, loss.ctc_weight_before=null and loss.guided_after_ctc=null."
        )
    if model.transducer is None and loss.transducer_weight:
        raise ValueError(
            f"`loss.transducer_weight` must be 0 or null for a model without transducer, but is "
            f"{loss.transducer_weight}: give model.transducer, or leave the weight out."
        )
    has_other = model.decoder is not None or model.transducer is not None
    if loss.ctc_weight is None:
        weight = 0.0 if not model.ctc else DEFAULT_CTC_WEIGHT if has_other else 1.0
        loss = replace(loss, ctc_weight=weight)
    if loss.transducer_weight is None:
        with_both = DEFAULT_TRANSDUCER_WEIGHT if model.decoder is not None else 1.0
        share = 0.0 if model.transducer is None else with_both
        loss = replace(loss, transducer_weight=share)
    if model.decoder is None:
        _check_without_decoder(loss, model)
    return loss


def _check_without_decoder(loss: LossConfig, model: ModelConfig) -> None:
    if model.transducer is None and (loss.ctc_weight != 1 or loss.guided_weight):
        raise ValueError(
            f"`loss` must be CTC alone for a model without decoder, but has ctc_weight "
            f"{loss.ctc_weight} and guided_weight {loss.guided_weight}: set them to 1 and 0."
        )
    if model.transducer is not None and (loss.transducer_weight != 1 or loss.guided_weight):
        raise ValueError(
            "`loss` must leave to the transducer what CTC leaves, for a model without decoder, but "
            f"has transducer_weight {loss.transducer_weight} and guided_weight "
            f"{loss.guided_weight}: set them to 1 and 0."
        )
