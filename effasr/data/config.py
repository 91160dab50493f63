"""Configuration of the training data, its batches and its loading."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from effasr.checks import check
from effasr.data.audio.augmentation.config import AudioAugmentationConfig
from effasr.data.audio.silence import SilencePaddingConfig
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.data.filters.config import FilterConfig, Limits, TextUse, Times
from effasr.data.languages import language_code
from effasr.data.mixture import MixConfig, leaves
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.options import Strategy, StrategyOptions
from effasr.data.sampling.packing import EpochEnd
from effasr.untrusted.remote import localized


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Manifests, tokenizer, budgets and loading.

    Attributes:
        train: Manifests to train on, of any kind that `effasr.data.manifest.reader.read` takes.
        mix: Sources with shares, in place of ``train``.
        validation: Manifests to evaluate on during training.
        tokenizer: Folder of the tokenizer.
        speed_perturbation: Speeds of training utterances. Each utterance is in every epoch once at
            every speed, as an utterance of its own, to whose length limits and shares apply. With
            0.9, 1.0 and 1.1, an epoch has three times the steps. Null for none.
        silence_padding: Silence at the ends of training utterances; null for none.
        audio_augmentation: Other augmentations of the audio: noise, rooms, the telephone.
        text: Use of transcripts. ``required``: utterances without a text are dropped. ``optional``:
            they are kept, for a teacher that writes their text during training
            (``training.teacher``). ``ignored``: no text is read, even where there is one; batches
            have no tokens, and are planned by their frames alone (``model.best_rq``).
        text_column: Field or column of the text in JSON lines, tables, tar files and datasets; by
            default one of the usual names, such as ``text`` and ``sentence``.
        timestamps: Times that the decoder writes around each of the words or segments, where data
            have them, as canary-1b-flash (``<|0|> word <|7|>``) and Whisper do (``<|0.00|> words
            <|1.20|>``); the prompt asks for them. A text with times of words alone is a segment.
        timestamp_share: The share of the utterances with times that are trained with them; others
            have the prompt of a text without, so that both stay trained.
        label_tokens_per_second: With text ``optional``, tokens that are reserved for each second of
            an utterance without text; by default a quarter more than any transcript has.
        language: The language of utterances that name none; in validation, it is what the model is
            mostly trained on. Null: en, and a training counts the lines that name none where the
            model is told the language.
        strategy: Batching strategy. ``packed`` fills the budgets of one static
            shape. The others are the batches of other toolkits, for comparison: ``random``,
            ``bucketed`` by duration, ``sync_bucketed`` (all ranks draw the same bucket, where
            they can) and ``sync_bucketed_2d`` (by duration and tokens).
        epoch_end: With ``packed``, use of utterances that fill no whole step: the next epoch
            begins with them (``carry``), or steps are a little emptier and the epoch is exactly the
            corpus (``exact``). By default ``carry``, or ``exact`` with ``mix`` and ``mix.epoch``
            infinite.
        padded: With a strategy other than ``packed``, whether micro-batches are computed at the
            length of their longest utterance, as other toolkits do. Audio is extended with silence
            and texts with the padding token. Silence is computed on and not masked: it takes part
            in the features' normalisation, in attention and in batch norm. Losses count real tokens
            alone.
        batch_duration: With a strategy other than ``packed``, seconds of a micro-batch, padding
            included; by default what the frame budget holds.
        batch_size: Utterances of it, in place of a duration.
        buckets: Buckets by duration; ``sync_bucketed_2d`` divides each in two by tokens.
        bucket_batch_sizes: JSON file of the buckets and batch sizes of ``sync_bucketed_2d``, see
            `effasr.data.sampling.bucket_table.BucketTable.save`; by default derived from the
            budgets.
        frame_budget: Encoder frames of a micro-batch: of 80 ms, of 40 ms with
            ``model.encoder.subsampling`` 4, a Whisper's of 20 ms. ``auto``: what `effasr calibrate`
            found for this machine, model and corpus; training finds it out where nobody did.
        token_budget: Decoder tokens (prompts and texts) of a micro-batch; by default what the
            corpus fills at the same time as the frame budget.
        max_sequences: Utterances of a micro-batch. ``auto``: a quarter more than the fullest of
            some has; a run keeps the number that it began with, and no plan exceeds it.
            Null: one for each 0.64 s, or for each ``model.features.minimum_s``, as in runs of
            earlier versions.
        micro_batches: Micro-batches of a global step, over all ranks: the gradient of a step
            does not depend on the number of ranks that share them.
        text_share: The part of a step's micro-batches that are text-only: pairs of a text and its
            translation, for the text encoder. Null where no manifest has such.
        text_token_budget: Decoder tokens of a text-only micro-batch beside others; by default as
            many as of another. ``auto``: as many as cost as much as another costs, in FLOPs, so
            that no rank waits for one that has speech.
        min_duration: Shorter utterances are dropped; seconds.
        max_duration: Longer utterances are dropped; seconds.
        filters: Further filters, and limits on what they drop.
        cache: Folder that keeps what was read from large manifests, about 0.5 kB for an utterance,
            for the other ranks and for later starts. ``auto``: the folder ``.corpus`` beside the
            runs; null: every process reads for itself.
        workers: Processes that load audio for each rank; 0 loads in the training process.
        prefetch: Micro-batches that each worker prepares ahead.
        on_bad_audio: ``raise`` stops at audio that cannot be read; ``skip`` leaves it out,
            counted and listed.
    """

    train: str | tuple[str, ...] = field(default=(), metadata={"remote": True})
    mix: MixConfig | None = None
    validation: str | tuple[str, ...] = field(default=(), metadata={"remote": True})
    tokenizer: str = field(default="", metadata={"remote": True})
    speed_perturbation: tuple[float, ...] | None = (1.0,)
    silence_padding: SilencePaddingConfig | None = None
    audio_augmentation: AudioAugmentationConfig = field(default_factory=AudioAugmentationConfig)
    text: TextUse = "required"
    text_column: str | None = None
    timestamps: Times = "none"
    timestamp_share: float = 0.5
    label_tokens_per_second: float | None = None
    language: str | None = None
    strategy: Strategy = "packed"
    epoch_end: EpochEnd | None = None
    padded: bool = False
    batch_duration: float | None = None
    batch_size: int | None = None
    buckets: int = 20
    bucket_batch_sizes: str | None = None
    frame_budget: int | Literal["auto"] = 8000
    token_budget: int | None = None
    max_sequences: int | Literal["auto"] | None = "auto"
    micro_batches: int = 1
    text_share: float | None = None
    text_token_budget: int | Literal["auto"] | None = None
    min_duration: float = 0.1
    max_duration: float = 40.0
    filters: FilterConfig = field(default_factory=FilterConfig)
    cache: str | None = "auto"
    workers: int = 4
    prefetch: int = 2
    on_bad_audio: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            value = getattr(self, name)
            paths = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, paths)
        object.__setattr__(self, "speed_perturbation", self.speeds)
        rule = "be left out where `mix` is given"
        remedy = "name the manifests in `mix.sources`"
        check(self.mix is None or not self.train, "train", rule, ", ".join(self.train), remedy)
        for name in ("frame_budget", "micro_batches", "prefetch"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        for name in ("token_budget", "max_sequences", "text_token_budget"):
            value = getattr(self, name)
            rule, is_valid = "be at least 1", value in (None, "auto") or value >= 1
            check(is_valid, name, rule, value, "leave it out to derive it")
        check(self.workers >= 0, "workers", "be at least 0", self.workers)
        rule, share = "be greater than 0 and at most 1", self.timestamp_share
        check(0 < share <= 1, "timestamp_share", rule, share, "timestamps=none trains without")
        rule = "be 'raise' or 'skip'"
        check(self.on_bad_audio in ("raise", "skip"), "on_bad_audio", rule, repr(self.on_bad_audio))
        self._check_text_share()
        rate = self.label_tokens_per_second
        if self.text == "optional" and self.strategy != "packed":
            raise ValueError(
                f"`text` must be required or ignored for strategy {self.strategy}, whose batches "
                "have no room for the labels of a teacher, but is optional: use strategy packed."
            )
        if self.text == "ignored" and self.padded:
            raise ValueError(
                "`padded` must be false where `text` is ignored, because silence put behind an "
                "utterance would be a target, but is true: set it to false."
            )
        if self.text == "ignored" and self.text_share is not None:
            raise ValueError(
                f"`text_share` must be null where `text` is ignored, but is {self.text_share:g}: "
                "pretrain on audio alone."
            )
        if rate is not None and (self.text != "optional" or not rate > 0):
            raise ValueError(
                "`label_tokens_per_second` must be greater than 0, and left out unless `text` is "
                f"optional, but is {rate:g} with `text` {self.text}."
            )
        self.limits()
        if self.epoch_end is not None and self.strategy != "packed":
            raise ValueError(
                f"`epoch_end` must be null for strategy {self.strategy}, which drops what is left, "
                f"but is {self.epoch_end}: use strategy packed."
            )
        if self.epoch_end == "carry" and self.mix is not None and self.mix.epoch == "infinite":
            raise ValueError(
                "`epoch_end` must be null or exact where `mix.epoch` is infinite, because each "
                "epoch has utterances of its own, but is carry."
            )
        self._options(None).check(self.strategy)

    @property
    def speeds(self) -> tuple[float, ...]:
        return (1.0,) if self.speed_perturbation is None else self.speed_perturbation

    def strategy_options(self, framing: Framing = FASTCONFORMER) -> StrategyOptions:
        path = self.bucket_batch_sizes
        return self._options(None if path is None else BucketTable.load(path, framing))

    def _options(self, table: BucketTable | None) -> StrategyOptions:
        return StrategyOptions(
            batch_duration=self.batch_duration,
            batch_size=self.batch_size,
            buckets=self.buckets,
            table=table,
            padded=self.padded,
        )

    def check_defaults(self, names: Iterable[str], when: str) -> None:
        """Check that fields which have no meaning in this case were left out."""
        default = DataConfig()
        for name in names:
            value = attrgetter(name)(self)
            is_default = value == attrgetter(name)(default)
            check(is_default, f"data.{name}", f"be left out {when}", value)

    @property
    def text_micro_batches(self) -> int:
        """Text-only micro-batches beside the others of a global step, over all ranks."""
        share = self.text_share
        return 0 if share is None else round(share * self.micro_batches)

    @property
    def corpus_micro_batches(self) -> int:
        """The others, of speech."""
        return self.micro_batches - self.text_micro_batches

    def _check_text_share(self) -> None:
        share, count = self.text_share, self.micro_batches
        if share is None:
            rule = "be left out where `text_share` is null"
            check(self.text_token_budget is None, "text_token_budget", rule, self.text_token_budget)
            return
        if not 0 < share < 1 or abs(share * count - self.text_micro_batches) > 1e-6:
            if count == 1:
                remedy = "use `micro_batches` = 2 or more"
            else:
                near = min(range(1, count), key=lambda number: abs(number - share * count))
                remedy = f"use {near / count:g}, for {near} of {count}"
            raise ValueError(
                f"`text_share` must make a whole number of micro-batches text-only, but not none "
                f"or all of them; it is {share:g}, of {count}: {remedy}."
            )
        rule = f"be null for strategy {self.strategy}"
        check(self.strategy == "packed", "text_share", rule, f"{share:g}", "use strategy packed")

    @property
    def manifests(self) -> list[tuple[str, int]]:
        """The manifests to train on, in the cache if remote, each with its source's number."""
        if self.mix is None:
            return [(str(localized(path)), 0) for path in self.train]
        numbered = enumerate(leaves(self.mix))
        return [(str(localized(path)), n) for n, leaf in numbered for path in leaf.manifests]

    @property
    def known_frame_budget(self) -> int:
        if self.frame_budget == "auto":
            raise ValueError(
                "`frame_budget` must be a number here, but is 'auto': `effasr calibrate` finds one."
            )
        return self.frame_budget

    @property
    def assumed_language(self) -> str:
        return self.language or "en"

    def limits(self, **of_model: Any) -> Limits:
        """Return the limits; ``of_model``: `Limits` that the model sets, such as ``framing``."""
        names = "min_duration", "max_duration", "token_budget", "text", "text_column"
        return Limits(
            **{name: getattr(self, name) for name in (*names, "timestamps", "timestamp_share")},
            frame_budget=None if self.frame_budget == "auto" else self.frame_budget,
            max_tokens_per_second=self.filters.max_tokens_per_second,
            max_characters_per_second=self.filters.max_characters_per_second,
            languages=tuple(map(language_code, self.filters.languages)),
            characters=self.filters.characters,
            speed_perturbation=self.speeds,
            **of_model,
        )
