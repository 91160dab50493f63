"""What a run is, before anything is built: every setting resolved, all data read and checked."""

import logging
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from effasr import checkpoint
from effasr import config as configuration
from effasr.checks import check
from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.loader import Loader
from effasr.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model, text_cost_model
from effasr.training import cuda_graph
from effasr.training.checkpointing.resume import (
    Saved,
    begin_anew,
    check_resumable,
    check_same_plan,
    must_stay,
    show_changes,
)
from effasr.training.config import (
    ASYNCHRONOUS,
    INTERVALS,
    KernelsConfig,
    TrainConfig,
    adascale_scale,
    resolve_losses,
)
from effasr.training.corpus import load_corpus
from effasr.training.weights import joins_language_model, source_of_model

if TYPE_CHECKING:
    from effasr.training.corpus import TrainingCorpus


# The same global batch on more ranks than it has micro-batches: each of them is divided.

_BUDGETS = ("frame_budget", "token_budget", "max_sequences", "text_token_budget")


def requested(config: TrainConfig) -> dict[str, Any]:
    """Return the fields that a division changes."""
    return {name: getattr(config.data, name) for name in ("micro_batches", *_BUDGETS)}


def divide(
    config: TrainConfig, corpus: "TrainingCorpus", ranks: int
) -> tuple[TrainConfig, int, str]:
    """Return the configuration of this many ranks, the parts of a micro-batch, and a line.

    No part is smaller than the longest utterance: else the batch grows.
    """
    data = config.data
    parts = -(-ranks // data.micro_batches)
    if parts == 1:
        return config, 1, ""
    rule = f"be at least the number of ranks, {ranks}, with data.strategy {data.strategy}"
    remedy = f"set data.micro_batches={ranks}, and a smaller batch each, or start fewer ranks"
    check(data.strategy == "packed", "data.micro_batches", rule, data.micro_batches, remedy)
    text = corpus.text
    lengths = [corpus.lengths, *([] if text is None else [text.lengths])]
    longest = int(corpus.lengths.frames.max())
    tokens = max(int(each.tokens.max()) for each in lengths)
    least = {"frame_budget": longest, "token_budget": tokens, "text_token_budget": tokens}
    before = data.known_frame_budget
    # A budget of the corpus is what it fills with the frames.
    shares = {"token_budget": corpus.shape.token_budget} if text is not None else {}
    values = {
        name: max(-(-value // parts), least.get(name, 1))
        for name in _BUDGETS
        if (value := getattr(data, name) or shares.get(name)) not in (None, "auto")
    }
    count, budget = parts * data.micro_batches, values["frame_budget"]
    line = f"{ranks} ranks share {data.micro_batches} x {before} frames, as {count} x {budget}"
    growth = count * budget / (data.micro_batches * before)
    if budget == longest and growth > 1.02:
        lr = config.optimizer.lr
        line += (
            f": the longest utterance needs that many, and the batch is {growth:.1f} times as "
            f"large. optimizer.lr stays {lr:g}; by the square-root rule it would be "
            f"{lr * math.sqrt(growth):.2g}"
        )
    else:
        line += ": the batch is the same"
    return with_parts(config, values | {"micro_batches": count}, parts), parts, line


def with_parts(config: TrainConfig, values: dict[str, Any], parts: int) -> TrainConfig:
    """Return the configuration with values of ``data``, and what counts micro-batches with it."""
    reference, ema = (
        config.optimizer.lr_reference_micro_batches,
        config.training.ema_reference_micro_batches,
    )
    return replace(
        config,
        data=replace(config.data, **values),
        optimizer=replace(
            config.optimizer, lr_reference_micro_batches=reference and reference * parts
        ),
        training=replace(config.training, ema_reference_micro_batches=ema and ema * parts),
    )


def as_before(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Return the configuration with the division of the checkpoint, on any number of ranks."""
    division = None if saved is None else saved.state.get("division")
    if saved is None or division is None:
        return config
    data = configuration.complete(TrainConfig, saved.state["config"])["data"]
    values = {name: data[name] for name in ("micro_batches", *_BUDGETS)}
    now, run = requested(config), configuration.to_mapping(config)
    if now == values:
        return config
    for name, before in division["requested"].items():
        if now[name] not in (before, "auto"):
            raise ValueError(must_stay(f"data.{name}", before, now[name], run))
    return with_parts(config, values, division["parts"])


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run, ready to be built."""

    # As config.yaml has it, with the budgets that ``auto`` stands for.
    config: TrainConfig
    # The checkpoint to continue from.
    saved: Saved | None
    tokenizer: Tokenizer
    corpus: "TrainingCorpus"
    loader: Loader
    # How micro-batches were divided among more ranks: the state for a resumed run.
    division: dict[str, Any] | None = None
    # What was derived, for the user.
    lines: Sequence[str] = ()


def resolve(config: TrainConfig, saved: Saved | None, context: DistributedContext) -> Resolved:
    """Resolve the settings, and read the tokenizer and the corpus; all ranks call this."""
    budgets = requested(config)
    config = resolve_config(as_before(config, saved), saved)
    if saved is None:
        check_effects(config)
    division, lines = None, []
    if saved is not None:
        check_resumable(saved, config, context.size)
    tokenizer = find_tokenizer(config, saved)
    if config.kernels != KernelsConfig():
        _check_kernels(config, context.device)
    if config.data.frame_budget == "auto":
        from effasr.training.calibration.calibrate import resolve_auto_frame_budget

        config = resolve_auto_frame_budget(config, tokenizer, context)
    corpus = load_corpus(config, tokenizer, saved)
    if saved is not None:
        division = saved.state.get("division")
    elif config.data.micro_batches < context.size:
        config, parts, line = divide(config, corpus, context.size)
        lines.append(line)
        division = {"parts": parts, "requested": budgets}
        corpus = load_corpus(config, tokenizer, saved)
    if config.data.max_sequences == "auto" and config.data.strategy == "packed":
        # A resumed run has the same shape, whatever a later version would derive.
        data = replace(config.data, max_sequences=corpus.shape.max_sequences)
        config = replace(config, data=data)
    cost = cost_model(config.model, tokenizer.vocab_size)
    text_cost = text_cost_model(config.model, tokenizer.vocab_size) or cost
    loader = Loader(
        corpus,
        config.data,
        seed=config.seed,
        rank=context.rank,
        world_size=context.size,
        pin_memory=context.device.type == "cuda",
        cost=cost,
        text_cost=text_cost,
    )
    if saved is not None:
        check_same_plan(saved.state, loader.fingerprint)
    if (epochs := config.training.max_epochs) is not None:
        # Each rank plans some of them, because the plan of a large corpus takes seconds.
        counted = loader.count_steps(range(context.rank, epochs, context.size))
        steps = sum(context.all_gather(counted))
        training = replace(config.training, max_steps=steps, max_epochs=None)
        config = replace(config, training=training)
        lines.append(f"training.max_epochs={epochs}: {steps} steps")
    if _is_padded(config.model):
        lines.append("the language model has an encoder: inside it, batches are padded, not packed")
    _check_warmup(config)
    if saved is not None:
        show_changes(saved, config)
    return Resolved(config, saved, tokenizer, corpus, loader, division, lines)


def _check_kernels(config: TrainConfig, device: torch.device) -> None:
    """Refuse backends that cannot serve, before the corpus is read."""
    # Imported here, as only a run with such a choice builds a model before it has data.
    from effasr.model.asr import ASRModel
    from effasr.training.kernels import select_backends

    with torch.device("meta"):
        model = ASRModel(config.model, vocab_size=1)
    select_backends(model, config, device)


def _check_warmup(config: TrainConfig) -> None:
    warmup, steps = config.schedule.warmup_steps, config.training.known_steps
    if config.schedule.name in _FALLING:
        steps = min(steps, config.schedule.steps or steps)
    if warmup > steps:
        log.warning(
            "the warm-up, schedule.warmup_steps=%d, is longer than the %s of %d steps: the "
            "learning rate only reaches %d %% of its peak; set schedule.warmup_steps to about %d",
            *(warmup, "run" if steps == config.training.known_steps else "schedule"),
            *(steps, 100 * steps // warmup, max(1, steps // 10)),
        )


_GIVEN = ("is given", ())

_FALLING = ("cosine", "flat_cosine", "wsd")

_BUCKETED = ("bucketed", "sync_bucketed", "sync_bucketed_2d")

_UNLESS: Sequence[tuple[str, str, tuple[str, tuple[Any, ...]]]] = (
    ("data.buckets", "data.strategy", ("is", _BUCKETED)),
    ("data.prefetch", "data.workers", _GIVEN),
    ("data.filters.max_tokens_per_second", "data.text", ("is not", ("ignored",))),
    ("data.filters.max_characters_per_second", "data.text", ("is not", ("ignored",))),
    ("data.filters.rate_deviations", "data.text", ("is not", ("ignored",))),
    ("data.filters.characters", "data.text", ("is not", ("ignored",))),
    ("data.filters.max_unknown", "data.text", ("is not", ("ignored",))),
    (
        "data.audio_augmentation.reverberation.decay_time",
        *("data.audio_augmentation.reverberation.simulated", _GIVEN),
    ),
    ("loss.label_smoothing", "model.decoder", _GIVEN),
    ("loss.label_smoothing", "model.language_model", _GIVEN),
    ("loss.guided_sigma", "loss.guided_weight", _GIVEN),
    ("loss.guided_after_ctc", "loss.guided_weight", _GIVEN),
    ("loss.guided_after_ctc", "loss.ctc_weight_before", _GIVEN),
    ("loss.consistency_after_ctc", "loss.consistency_weight", _GIVEN),
    ("optimizer.lr_reference_micro_batches", "optimizer.lr_scaling", ("is not", ("none",))),
    ("optimizer.lr_reference_micro_batches", "optimizer.adascale", _GIVEN),
    ("optimizer.exempt", "optimizer.weight_decay", _GIVEN),
    ("optimizer.momentum", "optimizer.name", ("is", ("muon",))),
    ("schedule.steps", "schedule.name", ("is", _FALLING)),
    ("schedule.width", "schedule.name", ("is", ("noam",))),
    ("schedule.flat_fraction", "schedule.name", ("is", ("flat_cosine",))),
    ("schedule.decay_fraction", "schedule.name", ("is", ("wsd",))),
    ("schedule.min_ratio", "schedule.name", ("is not", ("constant",))),
    ("training.patience", "data.validation", _GIVEN),
    ("training.freeze_steps", "training.freeze", _GIVEN),
    ("training.ema_reference_micro_batches", "training.ema_decay", _GIVEN),
    ("training.local_sgd.*", "training.strategy", ("is", ("local_sgd",))),
    ("training.hierarchical.*", "training.strategy", ("is", ("hierarchical",))),
    ("training.delayed.*", "training.strategy", ("is", ("delayed",))),
    ("training.gossip.*", "training.strategy", ("is", ASYNCHRONOUS)),
    ("training.profile.first_step", "training.profile.tool", ("is not", ("none",))),
    ("training.profile.first_step", "training.profile.memory", _GIVEN),
    ("kernels.decoder_attention", "model.decoder", _GIVEN),
    ("kernels.cross_attention", "model.decoder", _GIVEN),
    ("kernels.guided_attention", "loss.guided_weight", _GIVEN),
    ("kernels.ctc_loss", "model.ctc", _GIVEN),
    ("kernels.transducer_loss", "model.transducer", _GIVEN),
    ("training.profile.steps", "training.profile.tool", ("is not", ("none",))),
    ("training.profile.steps", "training.profile.memory", _GIVEN),
    ("training.profile.ranges", "training.profile.tool", ("is not", ("none",))),
    ("training.profile.layers", "training.profile.tool", ("is not", ("none",))),
    ("evaluation.best_by", "model.best_rq", ("is", (None,))),
    *(
        (f"evaluation.decoding.{name}", f"evaluation.decoding.{other}", condition)
        for name in ("length_penalty", "coverage_penalty")
        for other, condition in (
            ("beam", ("is not", (1,))),
            *((other, _GIVEN) for other in ("ctc_weight", "lm", "no_repeat_ngram")),
        )
    ),
    ("model.transducer.layers", "model.transducer.predictor", ("is", ("lstm",))),
    ("model.transducer.context", "model.transducer.predictor", ("is", ("stateless",))),
    ("model.transducer.sigma", "model.transducer.durations", _GIVEN),
    ("model.spec_augment.freq_width", "model.spec_augment.freq_masks", _GIVEN),
    ("model.spec_augment.time_width", "model.spec_augment.time_masks", _GIVEN),
    ("model.spec_augment.after_ctc", "model.spec_augment.freq_masks", _GIVEN),
    ("model.spec_augment.after_ctc", "model.spec_augment.time_masks", _GIVEN),
    ("model.language_model.adapter_width", "model.language_model.adapter", ("is", ("mlp",))),
    ("model.text_encoder.upsample", "model.text_encoder.shared_layers", _GIVEN),
    ("model.text_encoder.durations", "model.text_encoder.shared_layers", _GIVEN),
    ("model.text_encoder.mask", "model.text_encoder.shared_layers", _GIVEN),
    ("model.encoder.position_dropout", "model.encoder.position", ("is", ("relative",))),
)
"""Fields that have no effect unless another field has certain values; any row of a field will do.

A value that is given is neither null nor false, zero or empty."""


def check_effects(config: TrainConfig) -> None:
    """Refuse values other than the defaults of fields that have no effect."""
    unused: dict[str, str] = {}
    for path in dict.fromkeys(path for path, _, _ in _UNLESS):
        parent, _, name = path.rpartition(".")
        section = _value(config, parent)
        rows = [row for row in _UNLESS if row[0] == path]
        # What an imported model has may have no use in it.
        is_imported = config.init_from is not None and path.startswith("model.")
        if section is None or is_imported or any(_holds(config, *row[1:]) for row in rows):
            continue
        rules = (" ".join([other, word, *_listed(values)]) for _, other, (word, values) in rows)
        rule = " or ".join(rules)
        for each in fields(section):
            value = getattr(section, each.name)
            default = each.default if each.default_factory is MISSING else each.default_factory()
            # What is switched off has no effect anywhere, and recipes for many models say so.
            if name in ("*", each.name) and value and value != default:
                unused[f"{parent}.{each.name}={configuration.text_of(default)}"] = (
                    f"`{parent}.{each.name}` has no effect unless {rule}, but is "
                    f"{configuration.text_of(value)}"
                )
    if unused:
        raise ValueError(
            f"{'; '.join(unused.values())}: leave it out, or set the default, {' '.join(unused)}."
        )


def _value(config: TrainConfig, path: str) -> Any:
    return reduce(lambda node, part: getattr(node, part, None), path.split("."), config)


def _holds(config: TrainConfig, other: str, condition: tuple[str, tuple[Any, ...]]) -> bool:
    word, values = condition
    value = _value(config, other)
    return bool(value) if condition is _GIVEN else (value in values) == (word == "is")


def _listed(values: tuple[Any, ...]) -> list[str]:
    return [" or ".join(map(configuration.text_of, values))] if values else []


def resolve_config(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Resolve all defaults but the budgets that are ``auto``, which need the corpus."""
    source = source_of_model(config, saved)
    if saved is not None and "auto" in (config.data.frame_budget, config.data.max_sequences):
        before = configuration.complete(TrainConfig, saved.state["config"])["data"]
        names = ["max_sequences"]
        if config.data.frame_budget == "auto":
            names += ["frame_budget", "token_budget"]
        budgets = {name: before[name] for name in names}
        config = replace(config, data=replace(config.data, **budgets))
    text_encoder = config.model.text_encoder
    is_default = config.model == ModelConfig(text_encoder=text_encoder)
    if source is not None and config.init_from is not None and is_default:
        model = checkpoint.read_description(source).model
        model = replace(model, text_encoder=text_encoder or model.text_encoder)
        config = replace(config, model=model)
    config = _resolve_adapters(config, source, saved)
    if config.model.language_model is not None:
        config = _resolve_language_model(config, saved)
    _check_features(config.model.features)
    _check_static_shapes(config)
    _check_strategy(config)
    _check_trained(config)
    _check_text(config)
    if config.optimizer.adascale is not None:
        adascale_scale(config)
    if config.schedule.name == "noam" and config.schedule.width is None:
        width = config.model.encoder.width
        config = replace(config, schedule=replace(config.schedule, width=width))
    loss = resolve_losses(config.loss, config.model)
    return replace(config, loss=loss, training=replace(config.training, restart=False))


def find_tokenizer(config: TrainConfig, saved: Saved | None) -> Tokenizer:
    """Return the tokenizer of the checkpoint, or of ``data.tokenizer``, or of ``init_from``."""
    if config.model.best_rq is not None:
        return NoTokenizer()
    source = source_of_model(config, saved)
    path = config.data.tokenizer
    if saved is None and joins_language_model(config, source):
        assert config.model.language_model is not None
        return load_tokenizer(path or config.model.language_model.path)
    of_source = None if source is None else checkpoint.read_tokenizer(source)
    if (
        of_source is not None
        and not isinstance(of_source, NoTokenizer)
        and (saved is not None or not path)
    ):
        before = None if saved is None else saved.state["config"]["data"].get("tokenizer")
        has_moved = saved is not None and path and path != before
        if has_moved and load_tokenizer(path).pieces() != of_source.pieces():
            raise ValueError(
                f"`data.tokenizer` must stay the one of the checkpoint, from {before}, but {path} "
                "has other pieces: leave it, "
                f"{begin_anew(configuration.to_mapping(config))}."
            )
        return of_source
    check(path, "data.tokenizer", "be a folder that `effasr tokenizer` wrote", "not given")
    return load_tokenizer(path)


def _resolve_adapters(config: TrainConfig, source: Any, saved: Saved | None) -> TrainConfig:
    """Tell the model which languages have adapters of their own."""
    languages = () if config.lora is None else config.lora.by_language
    if source is not None and saved is None:
        before = checkpoint.read_description(source).model.language_adapters
        command = f"effasr export {config.init_from} OUT --format effasr --merge-language"
        rule = "be a model without adapters by language"
        remedy = f"merge those of one language: {command} {before[0]}" if before else ""
        check(not before, "init_from", rule, f"one with those of {', '.join(before)}", remedy)
    stated = config.model.language_adapters
    rule = "be left out, as `lora.by_language` sets it"
    check(stated in ((), languages), "model.language_adapters", rule, list(stated))
    return replace(config, model=replace(config.model, language_adapters=languages))


def _resolve_language_model(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Return the configuration with the architecture of the language model.

    It is that of the checkpoint, so that a run continues without the folder, or of the folder.
    """
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import read_architecture

    settings = config.model.language_model
    assert settings is not None
    if settings.architecture is not None:
        return config
    if saved is not None:
        before = configuration.complete(TrainConfig, saved.state["config"])["model"]
        architecture = (before.get("language_model") or {}).get("architecture")
        if architecture is None:
            raise ValueError(
                "`model.language_model` must stay null, as in the checkpoint of this run: leave "
                f"it out, {begin_anew(configuration.to_mapping(config))}."
            )
    else:
        architecture = read_architecture(settings.path)
    settings = replace(settings, architecture=architecture)
    return replace(config, model=replace(config.model, language_model=settings))


def _check_features(features: FeatureConfig) -> None:
    """Check the sample rate and hop that the data are planned and loaded for."""
    # That of samples is checked by their own configuration.
    hop = features.hop if features.kind == "waveform" else FeatureConfig().hop
    for name, loaded in (("sample_rate", SAMPLE_RATE), ("hop", hop)):
        if getattr(features, name) != loaded:
            raise ValueError(
                f"`model.features.{name}` must be {loaded}, with which training loads audio, "
                f"but is {getattr(features, name)}."
            )


def _check_static_shapes(config: TrainConfig) -> None:
    """Check that batches have one shape where a step is recorded or compiled."""
    if config.training.cuda_graph is True:
        cuda_graph.raise_first(cuda_graph.obstacles_of_batches(config))
    if config.training.compile and config.data.strategy != "packed":
        raise ValueError(
            f"`training.compile` must be false for `data.strategy` = {config.data.strategy}, "
            "whose batches have a shape each, but is true: set it to false, or train with "
            "strategy packed."
        )
    if config.training.compile and _is_padded(config.model):
        raise ValueError(
            "`training.compile` must be false for an encoder-decoder language model, whose padded "
            "batches have a shape each, but is true: set it to false."
        )


def _is_padded(model: ModelConfig) -> bool:
    """Return whether batches are padded inside the language model."""
    settings = model.language_model
    if settings is None or settings.architecture is None:
        return False
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import is_encoder_decoder

    return is_encoder_decoder(settings.architecture)


def _check_strategy(config: TrainConfig) -> None:
    settings, strategy = config.training, config.training.strategy
    is_single = settings.max_epochs is None or config.optimizer.adascale is None
    rule = "be null with optimizer.adascale, whose steps count as several"
    remedy = "set training.max_steps"
    check(is_single, "training.max_epochs", rule, settings.max_epochs, remedy)
    if strategy in ASYNCHRONOUS:
        apart = f"with training.strategy {strategy}, whose learners have no step in common"
        steps = settings.freeze_steps
        check(steps is None, "training.freeze_steps", f"be null {apart}", steps)
        for name in INTERVALS:
            value, rule = getattr(settings, name), f"be a number of steps {apart}"
            check(not isinstance(value, str), f"training.{name}", rule, repr(value))
        rule = (
            f"be packed with training.strategy {strategy}, whose learners take the next part of a "
            "plan when they are ready"
        )
        remedy = (
            "lhotse's samplers distribute batches over a fixed number of ranks. Use packed, or "
            "training.strategy ddp"
        )
        plans = config.data.strategy
        check(plans == "packed", "data.strategy", rule, plans, remedy)
    if strategy == "adpsgd":
        size, rule = settings.gossip.learner_size, "be 1 or null with training.strategy adpsgd"
        remedy = "use h_adpsgd for learners of several processes"
        check(size in (None, 1), "training.gossip.learner_size", rule, size, remedy)
    if strategy != "fsdp2":
        return
    rule = (
        "be a number with training.strategy fsdp2, because trials run on one process, which would "
        "hold all shards"
    )
    remedy = "see `peak_memory_bytes` in metrics.jsonl of a short run, and choose it by that"
    check(config.data.frame_budget != "auto", "data.frame_budget", rule, "auto", remedy)
    if config.optimizer.name == "muon":
        raise ValueError(
            "`optimizer.name` must not be muon with training.strategy fsdp2, because the momentum "
            "of a matrix is orthogonalized as a whole, and each rank has a part: use adamw, or ddp."
        )
    rule = "be false or auto with training.strategy fsdp2, which casts the weights that it gathers"
    is_left = settings.bfloat16_weights is not True
    check(is_left, "training.bfloat16_weights", rule, "true", "leave it out")
    if config.training.cuda_graph is True:
        cuda_graph.raise_first(cuda_graph.obstacles_of_strategy(config))


def _check_trained(config: TrainConfig) -> None:
    frozen, lora = config.training.freeze, config.lora
    if lora is None:
        return
    rule = "be empty with `lora`, which trains nothing but adapters and lora.also_train"
    check(not frozen, "training.freeze", rule, list(frozen), "leave it out")
    language_model = config.model.language_model
    has_weights = language_model is not None and language_model.weights == "pretrained"
    rule = "be given with `lora`, whose adapters are of use only beside weights that were trained"
    remedy = "name a model directory or a run"
    check(config.init_from is not None or has_weights, "init_from", rule, "null", remedy)


def _check_text(config: TrainConfig) -> None:
    """Check that utterances without text have a use, and that what they are for has them."""
    text = config.data.text
    if config.model.best_rq is not None:
        rule = "be ignored where `model.best_rq` is given"
        remedy = (
            "set it to ignored; or, to fine-tune a pretrained encoder, give `model` an output, "
            "such as model.ctc=true"
        )
        check(text == "ignored", "data.text", rule, text, remedy)
        rule = "be left out where `model.best_rq` is given, because no text is read"
        check(not config.data.tokenizer, "data.tokenizer", rule, repr(config.data.tokenizer))
    else:
        rule = "be required or optional for a model that learns from texts"
        remedy = "give model.best_rq to pretrain on audio alone"
        check(text != "ignored", "data.text", rule, "ignored", remedy)
    has_teacher = config.training.teacher is not None
    if has_teacher != (text == "optional"):
        raise ValueError(
            "`training.teacher` must be given where `data.text` is optional, and nowhere else, but "
            f"is {'given' if has_teacher else 'null'} with `data.text` {text}: set "
            "training.teacher.min_confidence and data.text=optional, or neither."
        )
    if not has_teacher:
        return
    settings, model = config.training, config.model
    for name, is_met, rule in (
        ("training.ema_decay", settings.ema_decay is not None, "be given, such as 0.999"),
        ("training.strategy", settings.strategy == "ddp", "be ddp"),
        ("optimizer.adascale", config.optimizer.adascale is None, "be null"),
        ("model.ctc", model.ctc, "be true, because the teacher writes what CTC says"),
        ("model.transducer", model.transducer is None, "be null"),
        ("loss.ctc_weight", config.loss.ctc_weight != 0, "be greater than 0"),
    ):
        check(is_met, name, f"{rule}, where `training.teacher` is given", "not")
