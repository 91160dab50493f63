"""Collects the inputs of a recipe for a corpus: counts, vocabulary, practice, expected time."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from effasr import checkpoint, config
from effasr.data.config import DataConfig
from effasr.data.features.config import UNDERSTOOD_WINDOW_S
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.manifest.reader import iterate
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.statistics import guidance
from effasr.data.statistics.guidance import COLUMNS
from effasr.data.statistics.survey import FramesPerToken, Survey, frames_in, survey
from effasr.data.statistics.vocabulary import SUBSAMPLINGS, VocabularyChoice, choose_vocabulary
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.distributed.process_group import choose_device
from effasr.evaluation.evaluate import evaluate
from effasr.planning.listing import PROMPT_TOKENS, TOKENS_PER_SECOND
from effasr.training.calibration.calibrate import target_bytes
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.trial import Request, measure
from effasr.training.calibration.workload import Population
from effasr.training.config import TrainConfig
from effasr.training.resolve import resolve_config
from effasr.training.validation import even_sample
from effasr.untrusted.display import fold
from effasr.untrusted.documents import dump_scalar, read_yaml

# Recipes of `effasr init`, by published practice for corpora of about 1, 10, 100 and 1,000 hours.
#
# Published recipes are for larger batches on several GPUs. The batches, steps and warm-up here are
# those of effasr's own recipes for such sizes, where one exists. `Practice.sources` lists what was
# published.


SPEEDS = (0.9, 1.0, 1.1)
"""Speed perturbation factors, as in the recipes of Kaldi, icefall and ESPnet."""

LITTLE = 100.0  # hours below which starting from a trained model is much better

_MICRO_BATCH_SECONDS = {"cpu": 40.0, "cuda": 960.0}
"""Largest audio duration of a micro-batch, in seconds, by device: more is no faster."""

_LEAST_STEPS_OF_EPOCH = 8
_FINE_TUNING_PASSES = 10  # passes over the corpus in fine-tuning: a trained model needs no more

_PATIENCE = 4  # validations without a better result that end a fine-tuning, of about ten

_MOST_STEPS = 300_000
"""Largest number of steps of a run: larger corpora use more ranks instead of more steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """Settings for corpora of one order of magnitude."""

    hours: int  # that the settings are for
    under: float | None  # hours, exclusive upper limit
    width: int  # of encoder and decoder
    heads: int
    encoder_layers: int
    decoder_layers: int
    mel_bins: int = 80
    subsampling_channels: int = 256
    small: bool = False  # LayerNorm after subsampling, which helps small models to start
    dropout: float = 0.1  # of outputs, activations and attention
    freq_masks: int = 2
    freq_width: int = 27  # mel bands
    time_masks: int
    masks_after_ctc: float | None = None  # a share: see SpecAugmentConfig
    batch_seconds: float  # audio of a step
    epochs: float  # a speed-perturbed copy counts as one pass
    least_steps: int
    lr: float
    warmup_steps: int
    ctc_weights: tuple[float, float] = (0.3, 0.5)  # and until CTC has found the alignment
    schedule: str  # name and other fields, as YAML
    guided_weight: float
    sources: tuple[str, ...]  # published recipes of this size

    @property
    def feed_forward(self) -> int:
        return 4 * self.width

    def steps(self, hours: float) -> int:
        """Return the steps for a corpus of ``hours``, rounded to two significant digits."""
        steps = max(self.least_steps, self.epochs * hours * 3600 / self.batch_seconds)
        return int(float(f"{min(steps, _MOST_STEPS):.2g}"))

    def ema_decay(self, steps: int) -> float:
        """Return the decay of an average over about the last twentieth of a run."""
        return round(min(max(0.9, 1 - 20 / steps), 0.9999), 4)


@cache
def _written() -> dict[str, Any]:
    return read_yaml(Path(__file__).parent / "init.yaml")


def practices() -> tuple[Practice, ...]:
    return tuple(config.from_mapping(Practice, row) for row in _written()["practices"])


def _fill(template: str, **values: Any) -> str:
    return _written()["templates"][template].format(**values)


def practice_for(hours: float) -> Practice:
    """Return the row for a corpus of ``hours``."""
    return next(row for row in practices() if row.under is None or hours < row.under)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartModel:
    """The model that a recipe fine-tunes."""

    path: str
    parameters: int
    is_whisper: bool
    silence: float  # seconds to which its training extended utterances; 0 for none
    memory: int  # bytes that training may take on this machine
    new_head: bool = False  # whether only its encoder is read, for a new CTC head

    @property
    def full_bytes(self) -> int:
        """Bytes of float32 weights with gradients and the moments of AdamW."""
        return 16 * self.parameters

    @property
    def needs_adapters(self) -> bool:
        """Return whether too little memory would remain for activations."""
        return self.full_bytes > self.memory / 2

    @property
    def lr(self) -> float:
        rates = _written()["fine_tuning"]
        if self.new_head:
            return rates["new_head"]
        if self.needs_adapters:
            return rates["adapters"]
        if not self.is_whisper:
            return rates["default"]
        return next(
            row["lr"]
            for row in rates["whisper"]
            if row["under"] is None or self.parameters < row["under"]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRequest:
    """Inputs of a recipe."""

    name: str
    train: Sequence[str]
    dev: Sequence[str]
    tokenizer: str  # folder; empty where that of ``start`` is kept
    language: str
    hours: float
    utterances: int
    longest: float  # seconds
    practice: Practice
    framing: Framing
    frames_per_token: FramesPerToken | None  # None if not known
    vocabulary: str  # in words
    device: str  # cpu or cuda
    start: StartModel | None = None

    @property
    def frames(self) -> tuple[int, int]:
        """Frame budget of a micro-batch, and number of micro-batches of a step."""
        frames = self._batch_seconds * self._frames_per_second
        most = _MICRO_BATCH_SECONDS[self.device] / self.framing.seconds
        seconds = min(self.longest, DataConfig().max_duration) / min(SPEEDS)
        longest = self.framing.frames(math.ceil(seconds * SAMPLE_RATE))
        # A multiple of what an extended utterance has: nothing else would fit in the rest.
        unit = max(10, self.framing.minimum)
        rounded = lambda frames: unit * math.ceil(max(frames, longest) / unit)
        most = frames / rounded(min(most, frames))
        counts = (max(1, math.floor(most)), math.ceil(most))
        choices = ((rounded(frames / count), count) for count in counts)
        return min(choices, key=lambda choice: abs(math.prod(choice) - frames))

    @property
    def steps(self) -> int:
        if self.start is None:
            return self.practice.steps(self.hours)
        steps = _FINE_TUNING_PASSES * self.hours * 3600 / self._batch_seconds
        return int(float(f"{min(max(500, steps), 20_000):.2g}"))

    @property
    def step_seconds(self) -> float:
        """Audio duration of a step, in seconds, without the silence that extends utterances."""
        budget, count = self.frames
        return budget * count / self._frames_per_second

    @property
    def audio_hours(self) -> float:
        return self.steps * self.step_seconds / 3600

    @property
    def _frames_per_second(self) -> float:
        """Encoder frames of a second of audio; more where silence extends most utterances."""
        mean = self.hours * 3600 / self.utterances
        return max(1 / self.framing.seconds, self.framing.minimum / mean)

    @property
    def _batch_seconds(self) -> float:
        """Audio of a step, in seconds; reduced for a tiny corpus, for several steps an epoch."""
        epoch = self.hours * 3600 * len(SPEEDS)
        return min(self.practice.batch_seconds, epoch / _LEAST_STEPS_OF_EPOCH)


def recipe_text(request: RecipeRequest, time: str | None = None) -> str:
    """Return the recipe as YAML with comments; ``time`` is the expected time in words."""
    steps = request.steps
    # A fine-tuning has fewer steps, and soon none that is of use.
    validations, patience = 20, ""
    if request.start is not None:
        validations = 10
        patience = _fill("patience", count=_PATIENCE) if request.dev else ""
        if request.start.new_head:
            patience += _fill("head_alone", name=request.name)
    training = _fill(
        "training",
        steps=steps,
        passes=request.audio_hours / request.hours,
        patience=patience,
        every=max(1, int(float(f"{steps / validations:.1g}"))),
        ema_decay=request.practice.ema_decay(steps),
    )
    return _head(request, time) + _model(request) + training


def _head(request: RecipeRequest, time: str | None) -> str:
    practice = request.practice
    lines = [
        f"# Written by effasr init for {request.hours:,.2f} h in {request.utterances:,} utterances."
    ]
    if time is not None:
        lines += fold(f"# Expected time: {time}.", COLUMNS, "#   ")
    if request.start is not None:
        same = "encoder" if request.start.new_head else "architecture, tokenizer"
        lines.append(f"# Fine-tuning: {same} and features are those of the model.")
    else:
        if request.hours < LITTLE:
            lines += [
                "# Starting from a trained model gives far fewer errors from so little speech:",
                "#   effasr init ... --init-from MODEL",
            ]
        lines += [
            f"# Published practice for about {practice.hours:,} h, from which values are taken:",
            *(f"#   {source}" for source in practice.sources),
        ]
    return "\n".join([*lines, f"name: {dump_scalar(request.name)}", ""])


def _model(request: RecipeRequest) -> str:
    """Return the recipe's part on model, data, loss and optimizer."""
    practice, data, start = request.practice, _data(request), request.start
    if start is not None:
        if start.new_head:
            return _fill(
                "new_head",
                init_from=dump_scalar(start.path),
                data=data,
                tokenizer=dump_scalar(request.tokenizer),
                vocabulary=request.vocabulary,
                lr=start.lr,
                warmup_steps=max(50, request.steps // 10),
            )
        silence = adapters = ""
        window = request.framing.minimum * request.framing.seconds
        if window < start.silence:
            silence = _fill("less_silence", window=window, seconds=start.silence)
        if start.needs_adapters:
            full, memory = start.full_bytes / 1e9, start.memory / 1e9
            adapters = _fill("adapters", full=full, memory=memory)
        return _fill(
            "fine_tuning",
            init_from=dump_scalar(start.path),
            millions=start.parameters / 1e6,
            silence=silence,
            adapters=adapters,
            lr=start.lr,
            data=data,
            warmup_steps=max(50, request.steps // 10),
        )
    alignment = ""
    if request.frames_per_token is not None:
        median = request.frames_per_token.median
        alignment = (
            f"    # {median:.1f} frames per token in the median; CTC needs about 2.5 or more.\n"
        )
    late = practice.masks_after_ctc
    return _fill(
        "scratch",
        practice=practice,
        masks_after="" if late is None else f", after_ctc: {late:g}",
        framing=request.framing,
        alignment=alignment,
        encoder=_fill("sizes", practice=practice, layers=practice.encoder_layers),
        small=_fill("small") if practice.small else "",
        decoder=_fill("sizes", practice=practice, layers=practice.decoder_layers),
        data=data,
        tokenizer=dump_scalar(request.tokenizer),
        vocabulary=request.vocabulary,
    )


def _data(request: RecipeRequest) -> str:
    budget, count = request.frames
    validation = "# No validation without speech that is not trained on: validation: data/dev"
    if request.dev:
        validation = f"validation: {_paths(request.dev)}"
    language = ""
    if request.language != DataConfig().assumed_language:
        language = f"  language: {dump_scalar(request.language)}\n"
    return _fill(
        "data",
        train=_paths(request.train),
        validation=validation,
        language=language,
        speeds=", ".join(map(str, SPEEDS)),
        budget=budget,
        seconds=request.step_seconds / count,
        count=count,
        step_seconds=request.step_seconds,
        workers=2 if request.device == "cpu" else 8,
    )


def _paths(paths: Sequence[str]) -> str:
    listed = ", ".join(map(dump_scalar, paths))
    return listed if len(paths) == 1 else f"[{listed}]"


_SPECIAL_TOKENS = 16  # assumed number of special tokens of a tokenizer; it hardly affects the time

WARMUP, TIMED = 4, 8  # steps that are not timed, and those after them that are

_MOST_S = 60.0  # time after which no further step is timed

_MOST_REPEATED = 0.1  # share of the texts of a dev set that TRAIN may have without a warning

_VALIDATED = 16  # utterances decoded for the time of a validation

_MOST_MICRO_BATCHES = 4  # of a timed step: an update takes little beside as many


@dataclass(frozen=True, slots=True, eq=False)
class Initial:
    """A recipe to write, and the data that it is based on."""

    request: RecipeRequest
    survey: Survey
    vocabulary: VocabularyChoice | None  # to train a tokenizer with
    tokenizer: Tokenizer | None  # an existing one
    framing: Framing
    dev_seconds: float = 0.0  # audio of all dev sets
    repeated: tuple[str, ...] = ()  # dev sets with texts of the training data

    @classmethod
    def of(
        cls,
        train: Sequence[Path],
        *,
        dev: Sequence[Path] = (),
        name: str = "recipe",
        tokenizer: Path,
        init_from: Path | None = None,
        new_head: bool = False,
        language: str = "en",
        progress: Callable[[int], None] = lambda count: None,
    ) -> "Initial":
        """Survey a corpus and choose by its size; without ``tokenizer``, a vocabulary as well.

        With ``new_head`` only the encoder of ``init_from`` is read.
        """
        counts = survey(train, language=language, progress=progress)
        if not counts.utterances:
            raise ValueError(f"{', '.join(map(str, train))}: no utterances to write a recipe for.")
        dev_hours, known, repeated = 0.0, counts.sampled_texts(), []
        for manifest in dev:
            counted = survey([manifest], language=language)
            if not counted.utterances:
                raise ValueError(f"{manifest}: no utterances to validate on.")
            dev_hours += counted.hours
            share = len(known & (texts := counted.sampled_texts())) / max(1, len(texts))
            if share > _MOST_REPEATED:
                repeated.append(f"{manifest} ({100 * share:.0f} %)")
        vocabulary, reader, framing, start, has_ctc = None, None, Framing(), None, True
        if init_from is not None:
            source = checkpoint.resolve(str(init_from))
            model = checkpoint.read_description(source).model
            features, has_ctc = model.features, model.ctc or new_head
            reader = None if new_head else checkpoint.read_tokenizer(source)
            start = StartModel(
                path=str(init_from),
                parameters=checkpoint.count_parameters(source),
                is_whisper=features.kind == "whisper",
                silence=features.minimum_s,
                memory=target_bytes(CalibrationConfig(), choose_device("auto"), os.environ),
                new_head=new_head,
            )
            window = 0.0 if new_head else min(features.minimum_s, UNDERSTOOD_WINDOW_S)
            features = replace(features, minimum_s=window)
            framing = features.framing
        if reader is None and tokenizer.is_dir() and any(tokenizer.iterdir()):
            reader = load_tokenizer(tokenizer)
            if start is None:
                factor = reader.subsampling or _subsampling_for(counts, reader)
                framing = Framing(subsampling=factor)
        elif reader is None:
            # An encoder that is read may have finer frames than there is a choice of.
            factor = 8 if framing.samples == Framing().samples else 4
            vocabulary = choose_vocabulary(counts, subsampling=None if start is None else factor)
            if start is None:
                framing = Framing(subsampling=vocabulary.subsampling)
        if reader is not None and reader.languages:
            _check_languages(counts, reader, None if new_head else init_from)
        if vocabulary is not None:
            aligned = None if new_head else vocabulary.frames_per_token
        else:
            assert reader is not None
            aligned = counts.sampled(reader, framing) if has_ctc else None
        request = RecipeRequest(
            name=name,
            train=[str(path) for path in train],
            dev=[str(path) for path in dev],
            tokenizer="" if init_from is not None and not new_head else str(tokenizer),
            language=language,
            hours=counts.hours,
            utterances=counts.utterances,
            longest=counts.longest,
            practice=practice_for(counts.hours),
            framing=framing,
            frames_per_token=aligned,
            vocabulary=_describe_vocabulary(vocabulary, reader),
            device=choose_device("auto").type,
            start=start,
        )
        return cls(request, counts, vocabulary, reader, framing, 3600 * dev_hours, tuple(repeated))

    def describe(self) -> Iterator[str]:
        """Yield lines about the corpus, and a warning if CTC will still be hard to train."""
        yield guidance.describe_counts(self.survey)
        if self.repeated:
            yield from guidance.fold(
                f"warning: TRAIN has texts of {', '.join(self.repeated)}, too: error rates will be "
                "better than on new sentences, and the best checkpoint may be one that knows them "
                "by heart. Give --dev other sentences, best of other speakers."
            )
        ratios, request = self.request.frames_per_token, self.request
        if ratios is not None:
            yield guidance.describe_alignment(ratios, self.framing)
        if ratios is not None and ratios.is_hard(self.framing) and request.start is None:
            yield from guidance.warn_about_alignment(
                ratios,
                self.framing,
                with_subsampling=lambda other: None,
                survey=lambda: self.survey,
            )
        if request.start is None and request.hours < LITTLE:
            yield from guidance.fold(
                "To start from a trained model is better by far with so little speech: "
                "--init-from MODEL, a run or a model that effasr import made."
            )
        elif request.start is not None:
            yield "fine-tuning, which needs less speech and less time than training from scratch"

    def summary(self) -> str:
        request, practice = self.request, self.request.practice
        steps = f"{request.steps:,} steps of {request.step_seconds:.0f} s"
        if request.start is not None:
            does = "trains a head on" if request.start.new_head else "fine-tunes"
            return f"{does} {request.start.path} in {steps}"
        return (
            f"width {practice.width}, {practice.encoder_layers} + {practice.decoder_layers} "
            f"layers, {self.framing.subsampling}x, {request.vocabulary}, {steps}"
        )

    def text(self, time: str | None = None) -> str:
        return recipe_text(self.request, time)

    def expected_time(self) -> str:
        """Train a few steps and estimate the time of the whole run, with its validations."""
        device = choose_device("auto")
        with TemporaryDirectory() as temporary:
            path = Path(temporary) / "recipe.yaml"
            path.write_text(self.text(), encoding="utf-8")
            settings = config.load(TrainConfig, path)
        size, frames, tokens = self._workload()
        if not len(frames):
            longest = DataConfig().max_duration
            return f"unknown, because no text of at most {longest:g} s follows the speech"
        speeds = audio_seconds_per_second(settings, size, frames, tokens, device)
        if speeds is None:
            return f"unknown, because this machine's {device.type} has not enough memory for it"
        if not speeds:
            return "unknown, because no utterance is short enough for the model"
        low, median, high = np.percentile(speeds, (25, 50, 75))
        # Silence behind an utterance is computed, too.
        audio = self.request.steps * math.prod(self.request.frames) * self.framing.seconds
        validations, decoding = 0.0, ""
        if settings.data.validation:
            times = -(-settings.training.known_steps // int(settings.training.validate_every))
            # To encode and to decode greedily takes about a third of a training step.
            rate = 3 * median
            if self.request.start is not None and not self.request.start.new_head:
                times, rate = times + 1, self._decoding_rate(settings, device)
                decoding = f", of validations {rate:.3g}"
            validations = times * self.dev_seconds / rate
        middle, least, most = (
            duration_text(audio / speed + validations) for speed in (median, high, low)
        )
        return (
            f"{middle} on this machine's {device.type}, {least} to {most} by the quartiles of "
            f"{len(speeds)} steps (median {median:.3g} s of audio a second{decoding}"
            f"{_busy(device)})"
        )

    def _decoding_rate(self, settings: TrainConfig, device: torch.device) -> float:
        """Return the audio seconds per second of a validation, on a sample.

        Texts have at most about the length of references: before training it may repeat itself.
        """
        assert self.request.start is not None
        loaded = checkpoint.load_best(self.request.start.path, device)
        if self.request.start.silence and not self.framing.minimum:
            loaded = loaded.with_window(0.0)
        cuts = [cut for path in self.request.dev for cut in iterate(path, prompt=loaded.prompt)]
        sample = even_sample(cuts, _VALIDATED, 0)
        decoding = settings.evaluation.decoding
        ratios = self.survey.sampled(loaded.tokenizer, self.framing)
        if ratios is not None:
            tokens = 1.5 * FASTCONFORMER.seconds / self.framing.seconds / ratios.median
            decoding = replace(decoding, tokens_per_frame=tokens, extra_tokens=4)
        return evaluate(loaded.model, loaded.tokenizer, sample, config=decoding).rtfx or math.inf

    def _workload(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the vocabulary size, and frames and tokens of sampled utterances."""
        if self.tokenizer is not None:
            size, (seconds, ids) = (
                self.tokenizer.vocab_size,
                self.survey.sample_tokens(self.tokenizer),
            )
            tokens = np.array([len(tokens) for tokens in ids])
        else:
            assert self.vocabulary is not None
            size = sum(self.vocabulary.sizes.values()) + _SPECIAL_TOKENS
            seconds = self.survey.sample_seconds()
            rate = self.vocabulary.tokens_per_second or TOKENS_PER_SECOND
            tokens = np.maximum(1, np.round(seconds * rate).astype(np.int64))
        fitting = seconds <= DataConfig().max_duration
        frames = frames_in(seconds[fitting], self.framing)
        return size, frames, tokens[fitting] + PROMPT_TOKENS


def _busy(device: torch.device) -> str:
    """Return a remark if other programs use the processors during the measurement."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    # The measurement itself contributes a load of one per processor.
    if load <= 2 * processors:
        return ""
    # Threads that wait for one another's processor can take forty times as long as one thread.
    threaded = device.type == "cpu" and torch.get_num_threads() > 1
    remedy = ": set OMP_NUM_THREADS=1 to measure and train in one thread" if threaded else ""
    return f"; other programs ran, load {load:.0f}{remedy}"


def _check_languages(counts: Survey, tokenizer: Tokenizer, init_from: str | Path | None) -> None:
    """Refuse texts in languages that the tokenizer does not know: training would drop them."""
    if missing := [name for name in counts.languages if not tokenizer.knows(name)]:
        remedy = (
            f"`effasr prepare --language-map {missing[0]}=NEAR` names a near one for it, or train "
            "a tokenizer on TRAIN, and name it by data.tokenizer beside init_from in a recipe"
            if init_from is not None
            else "give --tokenizer a new folder, for one of TRAIN"
        )
        languages = ", ".join(
            [*tokenizer.languages[:8], *(["..."] if tokenizer.languages[8:] else [])]
        )
        raise ValueError(
            f"`TRAIN` must have texts in languages of the tokenizer ({languages}), but has some in "
            f"{', '.join(missing)}: {remedy}."
        )


def _subsampling_for(counts: Survey, tokenizer: Tokenizer) -> int:
    """Return the coarsest subsampling with enough frames per token, or else the finest."""
    for subsampling in SUBSAMPLINGS:
        framing = Framing(subsampling=subsampling)
        aligned = counts.sampled(tokenizer, framing)
        if aligned is None or not aligned.is_hard(framing):
            return subsampling
    return SUBSAMPLINGS[-1]


def _describe_vocabulary(choice: VocabularyChoice | None, tokenizer: Tokenizer | None) -> str:
    if choice is None:
        assert tokenizer is not None
        return f"{tokenizer.vocab_size:,} tokens"
    sizes = choice.sizes
    if len(sizes) == 1:
        return f"{sum(sizes.values()):,} pieces"
    return " and ".join(f"{size:,} pieces of {language}" for language, size in sizes.items())


def audio_seconds_per_second(
    recipe: TrainConfig,
    vocab_size: int,
    frames: np.ndarray,
    tokens: np.ndarray,
    device: torch.device,
) -> tuple[float, ...] | None:
    """Train a few steps in a separate process, on batches of these lengths.

    Returns seconds of audio per second of each step, none where the model can take no utterance;
    None if memory does not suffice. ``frames`` and ``tokens`` (n,) are those of utterances of the
    corpus, the prompt included. Audio loading is not measured, as it overlaps with training.
    """
    resolved = resolve_config(recipe, None)
    # Training drops what the model cannot read or write.
    decoder, most = resolved.model.decoder, resolved.model.encoder.max_frames
    fits = np.full(len(frames), fill_value=True) if most is None else frames <= most
    if decoder is not None:
        fits &= tokens <= decoder.max_positions
    if not fits.any():
        return ()
    lengths = UtteranceLengths(frames[fits].astype(np.int32), tokens[fits].astype(np.int32))
    framing = resolved.model.features.framing
    transducer = resolved.model.transducer is not None
    work = Population.of(lengths, framing=framing, transducer=transducer).workload(
        resolved.data.known_frame_budget, batches=TIMED
    )
    # The weights do not affect the time, and the trial has no run to continue.
    mapping = config.to_mapping(replace(resolved, init_from=None))
    target = target_bytes(resolved.calibration, device, os.environ)
    count = min(resolved.data.micro_batches, _MOST_MICRO_BATCHES)
    request = Request(mapping, vocab_size, str(device), target, count, work, WARMUP, _MOST_S)
    measured = measure(request)
    return tuple(measured.speeds) if measured.fits else None


def duration_text(seconds: float) -> str:
    """Return a duration in minutes, hours or days, as text."""
    for unit, size in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds / 60))} minutes"
