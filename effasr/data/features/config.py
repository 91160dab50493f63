"""Configuration of the features."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from effasr.checks import check, check_choices
from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing

_MOST_HOPS = {8: 14, 4: 6, 2: 3}
"""Largest window length in hops, by the mel rows of the slot that separates utterances."""

# With windows of 10 s a Whisper makes no more errors than with 30 s before any training. With less
# it repeats itself, and unlearns that slowly (docs/finetuning.md, "Silence").
UNDERSTOOD_WINDOW_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureConfig:
    """Parameters of the mel features, or of the samples that an encoder reads itself.

    Attributes:
        kind: Feature extraction of transformers' ``ParakeetFeatureExtractor``, which equals NeMo's,
            of its ``WhisperFeatureExtractor``, or ``waveform``, that of its
            ``Wav2Vec2FeatureExtractor``: samples, for which only ``sample_rate``, ``hop``,
            ``window``, ``normalize`` and ``epsilon`` count.
        sample_rate: Sample rate in Hz.
        subsampling: Mel rows of an encoder frame: 4 or 8 for a FastConformer, 2 for a Transformer,
            1 for samples; null for what the encoder of the model needs, and without a model for 8.
        minimum_s: Seconds that an utterance lasts at least: silence follows a shorter one, and the
            encoder sees it. 30 is what Whisper models were trained with; 0 for none, so that
            nothing is computed but the utterance.
        causal_subsampling: Whether the convolutions of the encoder read no later rows, which gives
            one frame more; the encoder of a model sets it.
        mel_bins: Mel bands from 0 Hz to half the sample rate; for a FastConformer a multiple of
            ``subsampling``.
        n_fft: Points of the Fourier transform.
        window: Samples of the Hann window, centred in the transform, or that a frame reads.
        hop: Samples between two mel rows, or frames.
        preemphasis: Share of the previous sample that is subtracted; 0 turns it off.
        normalize: Give each band, or the samples, zero mean and unit variance over each utterance.
        epsilon: Added to the variance of samples: 1e-5 is that of omniASR.
    """

    kind: Literal["parakeet", "whisper", "waveform"] = "parakeet"
    sample_rate: int = SAMPLE_RATE
    # Before it could be null it was 8, also where a stored configuration does not have it.
    subsampling: int | None = field(default=None, metadata={"before": 8})
    causal_subsampling: bool = False
    minimum_s: float = 0.0
    mel_bins: int = 80
    n_fft: int = 512
    window: int = 400
    hop: int = 160
    preemphasis: float = 0.97
    normalize: bool = True
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        for name in ("sample_rate", "mel_bins", "n_fft", "window", "hop"):
            check(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        check_choices(self, kind=("parakeet", "whisper", "waveform"))
        rows = self.rows_per_frame
        rule = "be 4 or 8 (FastConformer) or 2 (Transformer)"
        known = rows in (2, 4, 8) or self.kind == "waveform"
        check(known, "subsampling", rule, rows, "leave it out to take the encoder's")
        if rows > 2 and self.mel_bins % rows:
            times = {4: "twice", 8: "three times"}[rows]
            raise ValueError(
                f"`mel_bins` must be a multiple of {rows}, because the encoder halves the "
                f"bands {times}, but is {self.mel_bins}: use 64, 80 or 128."
            )
        check(self.epsilon > 0, "epsilon", "be positive", self.epsilon)
        rule = "be at least 0"
        remedy = "0 adds no silence"
        check(0 <= self.minimum_s < math.inf, "minimum_s", rule, self.minimum_s, remedy)
        if self.minimum_s and self.kind != "whisper":
            raise ValueError(
                f"`minimum_s` must be 0 for features of kind {self.kind}, whose models hear no "
                f"silence after an utterance, but is {self.minimum_s}."
            )
        if self.kind == "waveform":
            hop, window = (384, 895) if self.hop == 384 else (320, 400)
            for name, only in (("subsampling", 1), ("hop", hop), ("window", window)):
                if (value := getattr(self, name)) not in (only, None):
                    raise ValueError(
                        f"`{name}` must be {only} for features of kind waveform, but is {value}: "
                        "those are the strides and the reach of the encoder's convolutions (384 "
                        "and 895 of a Moonshine)."
                    )
            return
        rule = f"be at most n_fft = {self.n_fft}"
        check(self.window <= self.n_fft, "window", rule, self.window, "raise `n_fft`")
        most = _MOST_HOPS[rows]
        rule = (
            f"be at most {most} hops = {most * self.hop}, so that a window meets one utterance only"
        )
        check(self.window <= most * self.hop, "window", rule, self.window, "raise `hop`")
        check(0 <= self.preemphasis <= 1, "preemphasis", "be in [0, 1]", self.preemphasis)
        if self.kind == "whisper":
            for name, only in (("preemphasis", 0.0), ("normalize", False), ("window", self.n_fft)):
                rule = f"be {only} for features of kind whisper"
                remedy = (
                    "Whisper's have `n_fft` and `window` 400, `preemphasis` 0 and `normalize` false"
                )
                check(getattr(self, name) == only, name, rule, getattr(self, name), remedy)

    @property
    def rows_per_frame(self) -> int:
        """Mel rows of an encoder frame: ``subsampling``, or 8 where that is null."""
        if self.kind == "waveform":
            return 1
        return 8 if self.subsampling is None else self.subsampling

    @property
    def framing(self) -> Framing:
        """Framing, which gives the number of encoder frames of an utterance."""
        minimum = round(self.minimum_s * self.sample_rate)
        plain = Framing(
            hop=self.hop,
            subsampling=self.rows_per_frame,
            causal=self.causal_subsampling,
            margin=self.window - self.hop if self.kind == "waveform" else 0,
        )
        return replace(plain, minimum=plain.frames(minimum))

    def encoder_frames(self, samples: int) -> int:
        """Encoder frames of an utterance of this many samples."""
        return self.framing.frames(samples)
