"""Published practice for corpora of about 1, 10, 100 and 1,000 hours, as used by `effasr init`.

Published recipes are for larger batches on several GPUs. The batches, steps and warm-up here are
those of effasr's own recipes for such sizes, where one exists. `Practice.sources` lists what was
published.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_STEPS = 300_000
"""Largest number of steps of a run: larger corpora use more ranks instead of more steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Practice:
    """Settings for corpora of one order of magnitude.

    Attributes:
        hours: Corpus size that the settings are for.
        under: Exclusive upper limit of the corpus size, in hours; None for the last row.
        width: Channels of encoder and decoder.
        heads: Attention heads.
        encoder_layers: Conformer layers.
        decoder_layers: Decoder layers.
        mel_bins: Mel bands.
        subsampling_channels: Channels of the subsampling convolutions.
        small: Whether the encoder uses the settings that help small models to start: LayerNorm
            instead of batch norm and after subsampling, and absolute positions.
        dropout: Dropout of outputs, activations and attention.
        freq_masks: Number of SpecAugment frequency masks.
        freq_width: Largest width of a frequency mask, in mel bands.
        time_masks: Number of SpecAugment time masks.
        batch_seconds: Audio duration of a step, in seconds.
        epochs: Passes over the corpus; a speed-perturbed copy counts as one pass.
        least_steps: Least number of steps of a run.
        lr: Peak learning rate.
        warmup_steps: Number of warm-up steps of the schedule.
        ctc_weights: Weight of CTC, and its weight until CTC has found the alignment.
        schedule: Name and other fields of the schedule, as YAML.
        guided_weight: Weight of the guided-attention penalty.
        sources: Published recipes of this size, one a line.
    """

    hours: int
    under: float | None
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mel_bins: int = 80
    subsampling_channels: int = 256
    small: bool = False
    dropout: float = 0.1
    freq_masks: int = 2
    freq_width: int = 27
    time_masks: int
    batch_seconds: float
    epochs: float
    least_steps: int
    lr: float
    warmup_steps: int
    ctc_weights: tuple[float, float] = (0.3, 0.5)
    schedule: str
    guided_weight: float
    sources: tuple[str, ...]

    @property
    def feed_forward(self) -> int:
        """Channels of the feed-forward layers."""
        return 4 * self.width

    def steps(self, hours: float) -> int:
        """Return the steps for a corpus of ``hours``, rounded to two significant digits."""
        wanted = max(self.least_steps, self.epochs * hours * 3600 / self.batch_seconds)
        wanted = min(wanted, _MOST_STEPS)
        return int(float(f"{wanted:.2g}"))

    def ema_decay(self, steps: int) -> float:
        """Return the decay of an average over about the last twentieth of a run."""
        return round(min(max(0.9, 1 - 20 / steps), 0.9999), 4)


PRACTICE = (
    Practice(
        hours=1,
        under=4,
        width=144,
        heads=4,
        encoder_layers=4,
        decoder_layers=2,
        mel_bins=64,
        subsampling_channels=32,
        small=True,
        freq_width=15,
        time_masks=4,
        batch_seconds=20,
        epochs=45,
        least_steps=8000,
        lr=1.5e-3,
        warmup_steps=200,
        ctc_weights=(0.5, 0.9),
        schedule="name: flat_cosine, min_ratio: 0.02",
        guided_weight=2.0,
        sources=(
            "ESPnet ml_superb, 1 hour (train_asr_fbank_single.yaml): width 256, 2 layers, CTC, 32",
            "  utterances a step, 15,000 steps, dropout 0.1, SpecAugment",
            "SpeechBrain conformer_small.yaml: width 144",
            "effasr's own recipe small: layers, batch, learning rate and schedule",
        ),
    ),
    Practice(
        hours=10,
        under=30,
        width=176,
        heads=4,
        encoder_layers=12,
        decoder_layers=4,
        subsampling_channels=128,
        small=True,
        time_masks=5,
        batch_seconds=240,
        epochs=80,
        least_steps=5000,
        lr=1.5e-3,
        warmup_steps=1000,
        schedule="name: flat_cosine, min_ratio: 0.02",
        guided_weight=1.0,
        sources=(
            "NeMo conformer_ctc_bpe.yaml and fast-conformer_ctc_bpe.yaml, small (14 M): width 176,",
            "  4 heads, 16 layers, 5 time masks; fewer layers here, for fewer hours",
            "ESPnet commonvoice (egs2/commonvoice/asr1/run.sh): 150 pieces for most languages",
        ),
    ),
    Practice(
        hours=100,
        under=300,
        width=256,
        heads=4,
        encoder_layers=16,
        decoder_layers=6,
        time_masks=5,
        batch_seconds=960,
        epochs=106,
        least_steps=10_000,
        lr=2.0e-3,
        warmup_steps=5000,
        schedule="name: inverse_sqrt",
        guided_weight=1.0,
        sources=(
            "ESPnet librispeech_100 (train_asr_conformer_lr2e-3_warmup15k_*.yaml): width 256,",
            "  12 + 6 layers, dropout 0.1, CTC 0.3, learning rate 2e-3, 70 epochs at 3 speeds,",
            "  5 time masks, average of 10 checkpoints",
            "icefall librispeech (RESULTS-100hours.md): 500 pieces, 60 epochs, 600 s a step",
            "NeMo fast-conformer_ctc_bpe.yaml, medium (32 M): width 256, 4 heads, 16 layers",
        ),
    ),
    Practice(
        hours=1000,
        under=None,
        width=512,
        heads=8,
        encoder_layers=17,
        decoder_layers=6,
        time_masks=10,
        batch_seconds=960,
        epochs=42,
        least_steps=50_000,
        lr=1.0e-3,
        warmup_steps=10_000,
        schedule="name: inverse_sqrt",
        guided_weight=1.0,
        sources=(
            "NeMo fast-conformer_ctc_bpe.yaml, large (120 M): width 512, 8 heads, 17 layers,",
            "  10 time masks, learning rate 1e-3, weight decay 1e-3",
            "ESPnet librispeech (train_asr_conformer10_hop_length160.yaml): width 512,",
            "  12 + 6 layers, 50 epochs, 10 time masks, CTC 0.3, average of 10 checkpoints",
            "SpeechBrain conformer_large.yaml: width 512, 12 + 6 layers, rate 8e-4, CTC 0.3",
        ),
    ),
)
"""Rows sorted by size, the smallest first."""


def practice_for(hours: float) -> Practice:
    """Return the row for a corpus of ``hours``."""
    return next(row for row in PRACTICE if row.under is None or hours < row.under)
