"""Recipes of `effasr init`, by published practice for corpora of about 1, 10, 100 and 1,000 hours.

Published recipes are for larger batches on several GPUs. The batches, steps and warm-up here are
those of effasr's own recipes for such sizes, where one exists. `Practice.sources` lists what was
published.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from effasr import config
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing
from effasr.data.statistics.guidance import COLUMNS
from effasr.data.statistics.survey import FramesPerToken
from effasr.untrusted.display import fold
from effasr.untrusted.documents import dump_scalar, read_yaml

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
