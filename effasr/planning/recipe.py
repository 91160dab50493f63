"""Writes a recipe for a corpus: `effasr init`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing
from effasr.data.statistics.frames_per_token import FramesPerToken
from effasr.data.statistics.guidance import COLUMNS
from effasr.planning.practice import Practice
from effasr.untrusted.display import fold
from effasr.untrusted.documents import dump_scalar

SPEEDS = (0.9, 1.0, 1.1)
"""Speed perturbation factors, as in the recipes of Kaldi, icefall and ESPnet."""

LITTLE = 100.0
"""Hours below which starting from a trained model is much better."""

_MICRO_BATCH_SECONDS = {"cpu": 40.0, "cuda": 960.0}
"""Largest audio duration of a micro-batch, in seconds, by device: more is no faster."""

_LEAST_STEPS_OF_EPOCH = 8
_FINE_TUNING_PASSES = 10
"""Passes over the corpus in fine-tuning: a trained model needs no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRequest:
    """Inputs of a recipe.

    Attributes:
        name: Name of the run.
        train: Manifests to train on.
        dev: Manifests to validate on.
        tokenizer: Folder of the tokenizer; empty with ``init_from``.
        language: Language of utterances that name none.
        hours: Hours of audio in the corpus.
        utterances: Number of utterances in the corpus.
        longest: Duration of the longest utterance, in seconds.
        practice: Published practice for a corpus of this size.
        framing: Encoder framing of the model.
        frames_per_token: Frames per token with the tokenizer; None if not known.
        vocabulary: Description of the vocabulary.
        device: Device type: cpu or cuda.
        init_from: A model to start from; None to train from scratch.
    """

    name: str
    train: Sequence[str]
    dev: Sequence[str]
    tokenizer: str
    language: str
    hours: float
    utterances: int
    longest: float
    practice: Practice
    framing: Framing
    frames_per_token: FramesPerToken | None
    vocabulary: str
    device: str
    init_from: str | None = None

    @property
    def frames(self) -> tuple[int, int]:
        """Frame budget of a micro-batch, and number of micro-batches of a step."""
        wanted = self._batch_seconds * self._frames_per_second
        most = _MICRO_BATCH_SECONDS[self.device] / self.framing.seconds
        seconds = min(self.longest, DataConfig().max_duration) / min(SPEEDS)
        longest = self.framing.frames(math.ceil(seconds * SAMPLE_RATE))
        # A multiple of what an extended utterance has: nothing else would fit in the rest.
        unit = max(10, self.framing.minimum)
        budget = unit * math.ceil(max(min(most, wanted), longest) / unit)
        return budget, max(1, round(wanted / budget))

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        if self.init_from is None:
            return self.practice.steps(self.hours)
        wanted = _FINE_TUNING_PASSES * self.hours * 3600 / self._batch_seconds
        return int(float(f"{min(max(500, wanted), 20_000):.2g}"))

    @property
    def step_seconds(self) -> float:
        """Audio duration of a step, in seconds, without the silence that extends utterances."""
        budget, count = self.frames
        return budget * count / self._frames_per_second

    @property
    def audio_hours(self) -> float:
        """Audio duration of all steps, in hours."""
        return self.steps * self.step_seconds / 3600

    @property
    def _frames_per_second(self) -> float:
        """Encoder frames of a second of audio; more where silence extends most utterances."""
        mean = self.hours * 3600 / self.utterances
        return max(1 / self.framing.seconds, self.framing.minimum / mean)

    @property
    def _batch_seconds(self) -> float:
        """Audio of a step, in seconds; reduced for a tiny corpus, for several steps an epoch."""
        every = self.hours * 3600 * len(SPEEDS)
        return min(self.practice.batch_seconds, every / _LEAST_STEPS_OF_EPOCH)


def recipe_text(request: RecipeRequest, time: str | None = None) -> str:
    """Return the recipe as YAML with comments.

    Args:
        request: Inputs of the recipe.
        time: Expected time in words; None to leave it out.
    """
    parts = _scratch(request) if request.init_from is None else _fine_tuning(request)
    return "\n".join([*_head(request, time), *parts, *_training(request)]) + "\n"


def _head(request: RecipeRequest, time: str | None) -> Iterator[str]:
    practice = request.practice
    yield (
        f"# Written by effasr init for {request.hours:,.2f} h in {request.utterances:,} utterances."
    )
    if time is not None:
        yield from fold(f"# Expected time: {time}.", COLUMNS, "#   ")
    if request.init_from is None:
        if request.hours < LITTLE:
            yield "# Starting from a trained model gives far fewer errors from so little speech:"
            yield "#   effasr init ... --init-from MODEL"
        yield f"# Published practice for about {practice.hours:,} h, from which values are taken:"
        yield from (f"#   {source}" for source in practice.sources)
    else:
        yield "# Fine-tuning: architecture, tokenizer and features are those of the model."
    yield f"name: {dump_scalar(request.name)}"


def _scratch(request: RecipeRequest) -> Iterator[str]:
    practice = request.practice
    yield "model:"
    yield "  ctc: true"
    yield f"  features: {{mel_bins: {practice.mel_bins}}}"
    yield (
        f"  spec_augment: {{freq_masks: {practice.freq_masks}, freq_width: {practice.freq_width}, "
        f"time_masks: {practice.time_masks}, time_width: 0.05}}"
    )
    yield "  encoder:"
    if (found := request.frames_per_token) is not None:
        yield (
            f"    # {found.median:.1f} frames per token in the median; CTC needs about 2.5 or more."
        )
    yield f"    subsampling: {request.framing.subsampling}"
    sizes = _sizes(practice, practice.encoder_layers)
    yield from (f"    {line}" for line in sizes)
    yield f"    subsampling_channels: {practice.subsampling_channels}"
    if practice.small:
        yield "    # These help small models to start."
        yield "    conv_norm: layer_norm"
        yield "    subsampling_norm: true"
        yield "    input_positions: 0.3"
    yield "  decoder:"
    yield from (f"    {line}" for line in _sizes(practice, practice.decoder_layers))
    yield from _data(request)
    yield f"  tokenizer: {dump_scalar(request.tokenizer)} # {request.vocabulary}"
    yield "# CTC leads until it has found the alignment, then attention is guided along it."
    weight, before = practice.ctc_weights
    yield (
        f"loss: {{ctc_weight: {weight}, ctc_weight_before: {before}, "
        f"guided_weight: {practice.guided_weight}, guided_after_ctc: 1.5}}"
    )
    yield f"optimizer: {{lr: {practice.lr:.4f}, weight_decay: 0.01}}"
    yield f"schedule: {{{practice.schedule}, warmup_steps: {practice.warmup_steps}}}"


def _sizes(practice: Practice, layers: int) -> Iterator[str]:
    yield f"width: {practice.width}"
    yield f"layers: {layers}"
    yield f"heads: {practice.heads}"
    yield f"feed_forward: {practice.feed_forward}"
    for name in ("residual_dropout", "activation_dropout", "attention_dropout"):
        yield f"{name}: {practice.dropout}"


def _fine_tuning(request: RecipeRequest) -> Iterator[str]:
    yield f"init_from: {dump_scalar(request.init_from)}"
    yield from _data(request)
    yield "loss: {label_smoothing: 0.0}"
    yield "optimizer: {lr: 0.00002, weight_decay: 0.001}"
    yield f"schedule: {{name: cosine, warmup_steps: {max(50, request.steps // 10)}}}"


def _data(request: RecipeRequest) -> Iterator[str]:
    budget, count = request.frames
    yield "data:"
    yield f"  train: {_paths(request.train)}"
    if request.dev:
        yield f"  validation: {_paths(request.dev)}"
    else:
        yield "  # No validation without speech that is not trained on: validation: data/dev"
    if request.language != DataConfig().language:
        yield f"  language: {dump_scalar(request.language)}"
    yield "  # Each utterance is three times in an epoch, once at each speed."
    yield f"  speed_perturbation: [{', '.join(map(str, SPEEDS))}]"
    seconds = request.step_seconds / count
    yield f"  frame_budget: {budget} # {seconds:.0f} s of audio at a time; more on a larger machine"
    yield f"  micro_batches: {count} # {request.step_seconds:.0f} s of audio in a step"
    yield f"  workers: {2 if request.device == 'cpu' else 8}"


def _training(request: RecipeRequest) -> Iterator[str]:
    steps = request.steps
    every = max(1, int(float(f"{steps / 20:.1g}")))
    passes = request.audio_hours / request.hours
    yield "training:"
    yield f"  max_steps: {steps} # the hours of {passes:.0f} passes over the corpus"
    yield f"  validate_every: {every}"
    yield f"  checkpoint_every: {every}"
    yield "  # The average of the weights, over the last twentieth of all steps, is published."
    yield f"  ema_decay: {request.practice.ema_decay(steps)}"


def _paths(paths: Sequence[str]) -> str:
    listed = ", ".join(map(dump_scalar, paths))
    return listed if len(paths) == 1 else f"[{listed}]"
