"""The configuration of a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from effasr import config as configuration
from effasr.checks import check
from effasr.data.config import DataConfig
from effasr.decoding.config import AttentionBackend, DecodingConfig
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.averager import DelayedConfig, HierarchicalConfig, LocalSGDConfig
from effasr.model.config import ModelConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig, relative_batch
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.loss import LossConfig
from effasr.training.profiler import ProfileConfig
from effasr.untrusted.remote import is_url, local_path

_STEPS = 100_000
_UNITS = {"s": 1, "min": 60, "h": 3600}

INTERVALS = ("log_every", "validate_every", "checkpoint_every")
"""Fields of ``training`` that are steps or a time."""

ASYNCHRONOUS = ("adpsgd", "h_adpsgd")
"""Strategies whose learners do not wait for each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A teacher that labels utterances without text while the model is trained.

    The teacher is the average of the weights (``training.ema_decay``), in evaluation mode. It hears
    the same audio as the model, without SpecAugment and dropout, and writes what its CTC head says
    in each frame. Training continues with these labels as with transcripts, for the CTC loss; an
    attention decoder learns from transcripts alone.

    Attributes:
        after_step: Steps before the first labels; until then utterances without text count nothing.
        min_confidence: Labels below it are not used: exp(log p / n), with the probability p of the
            label over all alignments and its n tokens.

    References:
        Busbridge et al., How to scale your EMA, 2023, https://arxiv.org/abs/2307.13813; Higuchi et
        al., Momentum pseudo-labeling, 2021, https://arxiv.org/abs/2106.08922.
    """

    after_step: int = 0
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        check(self.after_step >= 0, "after_step", "be at least 0", self.after_step)
        rule = "be from 0 to 1"
        remedy = "0 takes every label"
        check(0 <= self.min_confidence <= 1, "min_confidence", rule, self.min_confidence, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosticsConfig:
    """Warnings during training about a model that does not learn as it should.

    They change nothing in training. Each is shown once when its condition begins, with cause and
    remedy, and again only if it comes back; warnings.jsonl has the same.

    Attributes:
        ctc_epochs: Passes over the corpus (a copy at another speed is one, too) after which the
            CTC loss must be lower than that of a CTC head that ignores the audio.
        ctc_steps: Least number of steps before that is asked of a corpus whose audio has enough
            encoder frames for each token; without them, CTC stays where it is.
        validations: Successive validations after which an error rate counts as stuck, and a
            validation loss that has risen since as overfitting.
        probe_utterances: Utterances of each validation set, and of each rank, whose losses are
            computed, among them that of the decoder with the encoder output of another utterance;
            0 for none.
        examples: Number of hypotheses shown at each validation, each with its reference.
    """

    ctc_epochs: int = 2
    ctc_steps: int = 100
    validations: int = 3
    probe_utterances: int = 32
    examples: int = 2

    def __post_init__(self) -> None:
        for name, least in (
            ("ctc_epochs", 1),
            ("ctc_steps", 0),
            ("validations", 2),
            ("probe_utterances", 0),
            ("examples", 0),
        ):
            value = getattr(self, name)
            if value < least:
                remedy = "set training.diagnostics=null for no warnings at all"
                raise ValueError(f"`{name}` must be at least {least}, but is {value}: {remedy}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The training loop: its length, its parallelism, and what it writes when.

    Attributes:
        max_steps: Updates of the whole run; 100,000 without ``max_epochs``.
        max_epochs: Epochs of the whole run, in place of ``max_steps``, which then are the steps
            that the plan of the data has in them, on any number of ranks.
        max_time: Hours, or a time such as ``90min``, after which this process stops as on a signal:
            with a checkpoint, from which the same command continues; null for no limit.
        patience: Number of validations in a row without a better result (`evaluation.best_by`)
            after which the run ends; null for none.
        stop_at: Stop after this step, with a checkpoint, as on a signal; the run continues from it
            when it is started again.
        log_every: Steps between two lines of metrics.jsonl, or a time such as ``30s``.
        validate_every: Steps between two validations, or a time such as ``2h``; the last step has
            one, too.
        validate_first: Whether to validate before the first step, for a first line with the error
            rate of the model that the run starts from; ``auto``: with ``init_from``.
        checkpoint_every: Steps between two checkpoints, or a time such as ``20min``; the last step
            has one, too.
        keep: Newest checkpoints to keep, besides that with the best validation.
        async_save: Whether training continues while a checkpoint is written. It then stops only for
            a copy to the host, which takes memory for weights and moments once more.
        precision: Autocast precision of matrix products; weights and sums are float32. ``auto``:
            bfloat16 on a GPU, float16 on one before Ampere (T4, V100), float32 on a CPU. With
            float16 the loss has a dynamic factor, and updates whose gradient it makes infinite are
            skipped: ``loss_scale`` and ``skipped`` in metrics.jsonl. On a CPU with AVX512-BF16
            (``lscpu`` lists avx512_bf16) bfloat16 makes a step about 1.5 times as fast; on one
            without, it is slow.
        bfloat16_weights: Whether weights are cast to bfloat16 once an update, all together, and not
            by autocast at every use in every micro-batch: the same results with fewer launches, for
            2 bytes a weight. On a GPU gradients of linear layers then stay in float32, too, which
            autocast rounds. ``auto``: on a GPU with precision bfloat16, except with fsdp2, which
            casts the weights that it gathers.
        clip: Largest norm of the gradient.
        freeze: Patterns of parameters, or of modules, that are not trained, such as ``encoder`` or
            ``encoder.layers.[0-9].*``: they have neither gradient nor moments, and nothing below
            the first trained parameter has a backward. Modules without trained parameters are in
            evaluation mode: their batch norms use, and keep, their statistics, and they have no
            dropout. SpecAugment stays.
        freeze_steps: Steps after which ``freeze`` ends and all is trained; null for never. The run
            is set up anew there, from a checkpoint.
        ema_decay: Decay of an average of the weights, which is validated and published; null for
            none.
        ema_reference_micro_batches: The micro-batches of a step, over all ranks, that ``ema_decay``
            is meant for: with k times as many, an update keeps ``ema_decay ** k``. null: always
            ``ema_decay``.
        teacher: A teacher that labels utterances without text (``data.text`` optional); null for
            none.
        on_nan: A non-finite loss or gradient never reaches the weights. ``stop`` ends the run there
            and names the utterances; ``skip`` lists them in skipped.jsonl.
        restart: Start again; the files of an earlier run of this name are renamed, not removed.
            Otherwise a run continues from its newest checkpoint.
        device: ``auto``: a GPU where there is one.
        threads: Threads of PyTorch on the CPU; null for PyTorch's default.
        timeout_s: Seconds that a rank waits for another before it counts as lost.
        data_timeout_s: Seconds that a rank waits for the data of a step before it exits.
        activation_checkpointing: Whether encoder and decoder layers keep only their inputs, and are
            computed again in the backward: less memory for up to a third more work, and the same
            gradients. ``true``: all layers. n: the first of every n.
        compile: Whether to use torch.compile for forward and backward, with fsdp2 layer by layer;
            the first step then takes minutes. What it gains is counted in docs/kernels.md.
        strategy: Parallelism over several processes. ``ddp``: each has all weights, and gradients
            are averaged while they are computed. ``fsdp2``: weights, gradients and moments are
            sharded, and layers are gathered when they are needed: for large models. With the
            others, each process makes updates of its own, and weights are averaged: for slow
            networks. ``local_sgd``: at intervals. ``hierarchical``: often among neighbours, seldom
            among all. ``delayed``: in every step, during the next update. ``adpsgd``: each process
            takes work when it is ready and averages with its neighbours in the background, so that
            slow processes delay nobody and lost ones do not end the run. ``h_adpsgd``: the same for
            nodes, with ddp within a node. All write the same checkpoints, from which a run may
            continue with another strategy.
        local_sgd: Schedule of the averages of ``local_sgd``.
        hierarchical: Groups and schedule of the averages of ``hierarchical``.
        delayed: Start of the averages of ``delayed``.
        gossip: Neighbours of ``adpsgd`` and ``h_adpsgd``.
        cuda_graph: Whether forward and backward of a micro-batch are recorded once as a CUDA graph
            and replayed, so that the host launches no kernels; needs a GPU. ``auto``: wherever that
            is possible, which ``effasr doctor --recipe RECIPE`` tells. Several ranks then exchange
            gradients after the backward, and not during it.
        loggers: What else gets the figures, under the same names: ``tensorboard`` (the default),
            ``wandb`` and ``mlflow``; ``pip install 'effasr[wandb]'`` or ``'effasr[mlflow]'`` has
            the last two. One that fails is left out, with a warning, and training goes on.
        tensorboard: Whether TensorBoard, if it is among ``loggers``, gets them.
        diagnostics: Warnings about a model that does not learn as it should; null for none.
        profile: Steps to profile.
    """

    max_steps: int | None = None
    max_epochs: int | None = field(default=None, metadata={"replaces": "max_steps"})
    max_time: float | str | None = None
    patience: int | None = None
    stop_at: int | None = None
    log_every: int | str = 50
    validate_every: int | str = 2000
    validate_first: bool | Literal["auto"] = "auto"
    checkpoint_every: int | str = 1000
    keep: int = 3
    async_save: bool = True
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    bfloat16_weights: bool | Literal["auto"] = "auto"
    clip: float = 1.0
    freeze: tuple[str, ...] = ()
    freeze_steps: int | None = None
    ema_decay: float | None = None
    ema_reference_micro_batches: int | None = None
    teacher: TeacherConfig | None = None
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
    cuda_graph: bool | Literal["auto"] = "auto"
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    tensorboard: bool = True
    diagnostics: DiagnosticsConfig | None = field(default_factory=DiagnosticsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_epochs is not None:
            raise ValueError(
                f"`max_epochs` must be null where `max_steps` is given, but they are "
                f"{self.max_epochs} and {self.max_steps}: set one of them to null."
            )
        if self.max_steps is None and self.max_epochs is None:
            object.__setattr__(self, "max_steps", _STEPS)
        for name in INTERVALS:
            if interval_seconds(name, getattr(self, name)) is None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        check(self.keep >= 1, "keep", "be at least 1", self.keep)
        if self.max_time_s is not None and self.max_time_s <= 0:
            raise ValueError(f"`max_time` must be positive or null, but is {self.max_time}.")
        for name in ("clip", "timeout_s", "data_timeout_s"):
            check(getattr(self, name) > 0, name, "be positive", getattr(self, name))
        if self.activation_checkpointing < 0:
            raise ValueError(
                "`activation_checkpointing` must be true, false or at least 1, but is "
                f"{self.activation_checkpointing}: 2 stands for every second layer."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"`ema_decay` must lie between 0 and 1, but is {self.ema_decay}.")
        for name in (
            *("max_steps", "max_epochs", "patience", "stop_at", "threads"),
            *("ema_reference_micro_batches", "freeze_steps"),
        ):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "be at least 1 or null", value)

    def frozen_at(self, step: int) -> tuple[str, ...]:
        """Return the patterns of ``freeze`` that hold after ``step`` updates."""
        return self.freeze if self.freeze_steps is None or step < self.freeze_steps else ()

    @property
    def known_steps(self) -> int:
        """``max_steps``, which `resolve` derives from ``max_epochs``."""
        return self.max_steps or _STEPS

    @property
    def max_time_s(self) -> float | None:
        if isinstance(self.max_time, str):
            return interval_seconds("max_time", self.max_time)
        return self.max_time and 3600 * self.max_time


def interval_seconds(name: str, value: int | str) -> float | None:
    """Return the seconds of an interval in time, such as ``20min``; None for one in steps."""
    if isinstance(value, int):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", value)
    if match is None or float(match[1]) <= 0:
        raise ValueError(
            f"`{name}` must be a number, or a time in s, min or h such as 20min, but is {value!r}."
        )
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Validation: how ``data.validation`` is transcribed during training.

    Without such data there is no validation, and no best checkpoint.

    Attributes:
        max_utterances: Number of utterances of each set, an even sample that ``seed`` chooses;
            null for all.
        best_by: Metric of the best checkpoint, and of ``training.patience``, over all sets of
            ``best_sets``: word or character error rate of the transcriptions, BLEU or chrF of the
            translations (pip install 'effasr[translation]'), the mean over pairs of languages, or
            the loss of the probe (``training.diagnostics``). auto: BLEU where all utterances are
            translations, else the word error rate. Pretraining on audio alone has its loss.
        best_sets: Names of these sets, as validation.jsonl has them; empty for all.
        normalizer: Normaliser of both texts before words are compared; see `effasr evaluate`.
        decoding: Decoding.
    """

    max_utterances: int | None = None
    best_by: Literal["auto", "wer", "cer", "bleu", "chrf", "loss"] = "auto"
    best_sets: tuple[str, ...] = ()
    normalizer: str = "basic"
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        if self.max_utterances is not None and self.max_utterances < 1:
            raise ValueError(
                f"`max_utterances` must be at least 1 or null, but is {self.max_utterances}."
            )


OwnBackend = Literal["auto", "triton", "cpp", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """Backends of operations that have several, in training; validation takes what serves it.

    ``auto``: of attention, the fastest that serves the call by the rows of ``profiling/results`` of
    a checkout that were measured on this GPU; without such rows, Triton on a GPU, and C++ or the
    reference on a CPU. Any other backend is never replaced: training does not start with one that
    cannot serve. Attention of a language model has no choice.

    Attributes:
        attention: Backend of all attention that has no field of its own. ``varlen`` and
            ``flash_attn_*`` compute in bfloat16 and float16, without positions, contexts and
            dropout; ``cuda`` with relative positions alone, in heads of 64 or 128 channels.
        decoder_attention: Of the decoder's self-attention; by default that of ``attention``.
        cross_attention: Of the decoder's attention to the encoder output, without the guided
            penalty; by default that of ``attention``.
        guided_attention: Of cross-attention with the guided penalty.
        ctc_loss: Of the CTC loss.
        transducer_loss: Of the transducer's loss.
    """

    attention: AttentionBackend = "auto"
    decoder_attention: AttentionBackend | None = None
    cross_attention: AttentionBackend | None = None
    guided_attention: OwnBackend = "auto"
    ctc_loss: OwnBackend = "auto"
    transducer_loss: OwnBackend = "auto"

    def __post_init__(self) -> None:
        for name in ("attention", "decoder_attention", "cross_attention"):
            choices, value = get_args(AttentionBackend), getattr(self, name)
            if value not in choices and (value is not None or name == "attention"):
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, but is {value!r}.")
        for name in ("guided_attention", "ctc_loss", "transducer_loss"):
            choices, value = get_args(OwnBackend), getattr(self, name)
            check(value in choices, name, f"be one of {', '.join(choices)}", repr(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A run.

    Attributes:
        name: Name of the run; its files are in ``output/name``.
        output: Folder of runs, or a URL of one in an object store.
        seed: Seed of the weights, the order of the data, dropout and augmentation.
        init_from: A model directory, or a run, to start from: its weights, its tokenizer and its
            architecture, of which ``model`` overrides single fields. With ``data.tokenizer`` its
            tokenizer is replaced, and what it has learnt of pieces that both have is kept. A
            ``model`` with other outputs takes the encoder and the outputs that both have; of one
            that was pretrained with ``best_rq``, a ``model`` without it takes the encoder.
        lora: Adapters that are trained in place of the weights of ``init_from``; null for none.
        model: The architecture.
        data: The utterances, the tokenizer and the batches.
        loss: Weights of the losses.
        optimizer: AdamW or LAMB.
        schedule: Learning-rate schedule.
        training: The loop.
        kernels: Backends of operations that have several.
        evaluation: Validation.
        calibration: Settings of ``data.frame_budget: auto``.
    """

    name: str = "run"
    output: str = field(default="runs", metadata={"remote": True})
    seed: int = 0
    init_from: str | None = field(default=None, metadata={"remote": True})
    lora: LoRAConfig | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: LoopConfig = field(default_factory=LoopConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @classmethod
    def inherited(cls, mapping: Mapping[str, Any]) -> Mapping[str, Any]:
        """Complete ``model`` from the model of ``init_from``, or of the run if that is gone."""
        # Imported here, because it imports the model.
        from effasr import checkpoint

        overrides, source = mapping.get("model"), mapping.get("init_from")
        if not overrides or not isinstance(overrides, Mapping) or not isinstance(source, str):
            return mapping
        run = run_folder(str(mapping.get("output", "runs")), str(mapping.get("name", "run")))
        for path in (source, run):
            try:
                model = checkpoint.read_description(checkpoint.resolve(path)).model
            except (ValueError, OSError):
                # `resolve` raises the error if the model is needed.
                continue
            base = configuration.to_mapping(model)
            if model.best_rq is not None and overrides.get("best_rq") is None:
                # Of pretraining, any output takes the encoder and what it reads.
                base = {name: base[name] for name in ("features", "spec_augment", "encoder")}
            if overrides.get("language_model") and model.language_model is None:
                # It takes the place of all outputs.
                base |= {"decoder": None, "transducer": None, "text_encoder": None, "ctc": False}
            merged = configuration.merged(base, overrides)
            encoder, features = overrides.get("encoder"), overrides.get("features")
            if _has_subsampling(encoder) and not _has_subsampling(features):
                # That of the encoder.
                merged["features"] = {**merged["features"], "subsampling": None}
            return {**mapping, "model": merged}
        return mapping

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"`name` must be usable as a folder's name, but is {self.name!r}.")
        check(0 <= self.seed < 2**63, "seed", "be at least 0 and fit in 63 bits", self.seed)


def run_folder(output: str, name: str) -> Path:
    """Return the folder that a run is trained in: in the cache, if ``output`` is a URL."""
    return local_path(f"{output}/{name}", "runs") if is_url(output) else Path(output) / name


def _has_subsampling(section: Any) -> bool:
    return isinstance(section, Mapping) and "subsampling" in section


def resolve_losses(loss: LossConfig, model: ModelConfig) -> LossConfig:
    """Resolve the weights of the losses, and check that the model has every loss."""
    # Here, because stored runs of earlier revisions have nats.
    for name, share in (
        ("model.spec_augment.after_ctc", model.spec_augment.after_ctc),
        ("loss.guided_after_ctc", loss.guided_after_ctc),
        ("loss.consistency_after_ctc", loss.consistency_after_ctc),
    ):
        rule = "be null or in (0, 1], a share of the CTC loss without listening"
        remedy = "0.7 is usual for masks, 0.35 for guided attention"
        check(share is None or 0 < share <= 1, name, rule, share, remedy)
    after = loss.guided_after_ctc or loss.consistency_after_ctc
    if not model.ctc and (loss.ctc_weight or loss.ctc_weight_before or after):
        raise ValueError(
            "`loss` must not use CTC for a model without CTC head: set model.ctc=true, or "
            "loss.ctc_weight=0, loss.ctc_weight_before=null, loss.guided_after_ctc=null and "
            "loss.consistency_after_ctc=null."
        )
    if model.transducer is None and loss.transducer_weight:
        raise ValueError(
            f"`loss.transducer_weight` must be 0 or null for a model without transducer, but is "
            f"{loss.transducer_weight}: give model.transducer, or leave the weight out."
        )
    if model.text_encoder is None and loss.consistency_weight:
        raise ValueError(
            "`loss.consistency_weight` must be 0 for a model without a text encoder, but is "
            f"{loss.consistency_weight:g}: give model.text_encoder, or leave the weight out."
        )
    shared = 0 if model.text_encoder is None else model.text_encoder.shared_layers
    if shared and not model.ctc and model.transducer is None:
        raise ValueError(
            "`model.text_encoder.shared_layers` must be 0 without a CTC head and a transducer, "
            f"which learn by them, but is {shared}: set it to 0, or model.ctc=true."
        )
    late = model.spec_augment.after_ctc
    if late is not None and (not model.ctc or model.encoder.kind == "wav2vec2"):
        raise ValueError(
            "`model.spec_augment.after_ctc` must be null without a CTC head, or with an encoder of "
            f"waveforms, but is {late:g}: leave it out."
        )
    sole_loss = "best_rq" if model.best_rq is not None else "language_model"
    if getattr(model, sole_loss) is not None:
        if loss.guided_weight or loss.guided_after_ctc:
            raise ValueError(
                f"`loss.guided_weight` must be 0 where `model.{sole_loss}` is given, which has no "
                f"cross-attention to guide, but is {loss.guided_weight}: leave it out."
            )
        return replace(loss, ctc_weight=0.0, transducer_weight=0.0)
    if loss.ctc_weight is None:
        has_other = model.decoder is not None or model.transducer is not None
        weight = 0.0 if not model.ctc else 0.3 if has_other else 1.0
        loss = replace(loss, ctc_weight=weight)
    if loss.transducer_weight is None:
        weight = 0.0 if model.transducer is None else 1.0 if model.decoder is None else 0.5
        loss = replace(loss, transducer_weight=weight)
    if model.decoder is not None:
        return loss
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
    return loss


def adascale_scale(config: TrainConfig, learners: int = 1) -> float:
    """Return the ratio of the batch of all learners to the reference batch."""
    optimizer, count = config.optimizer, config.data.micro_batches
    assert optimizer.adascale is not None
    apart = "" if learners == 1 else f" and {learners} processes or learners with their own updates"
    rule = f"be at least {2 * learners} with optimizer.adascale{apart}, as it measures how the "
    rule += "gradients of an update's micro-batches differ"
    check(count >= 2 * learners, "data.micro_batches", rule, count, "take more and smaller ones")
    if optimizer.adascale.scale is not None:
        return optimizer.adascale.scale
    scale = relative_batch(count, optimizer.lr_reference_micro_batches)
    if scale < 1:
        raise ValueError(
            f"`optimizer.lr_reference_micro_batches` must be at most data.micro_batches, {count}, "
            f"with optimizer.adascale, but is {optimizer.lr_reference_micro_batches}."
        )
    return scale
