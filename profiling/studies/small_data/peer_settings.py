"""Settings of the peer's training; read by a process that has SpeechBrain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """A CTC + attention Conformer of SpeechBrain; defaults follow its recipes for small models.

    The recipes are LibriSpeech's ``conformer_small`` and CommonVoice's ``conformer_large``, with
    steps and sizes scaled to the corpus: there, a batch has 300 s of audio, and 25,000 of 250,000
    steps are warm-up, 8,000 of them before SpecAugment.

    Attributes:
        train: Manifest to train on.
        test: Manifest to transcribe.
        out: Folder for results.
        cpu_s: CPU seconds of training.
        seed: Seed of weights, order and augmentation.
        raw_text: Whether texts are used unchanged for training. Otherwise they are lowercased and
            stripped of punctuation, as in SpeechBrain's recipes.
        vocab_size: Number of pieces of the SentencePiece unigram model.
        batch_s: Largest audio duration of a batch, in seconds.
        encoder_layers: Number of Conformer layers.
        decoder_layers: Number of Transformer decoder layers.
        width: Model dimension.
        heads: Number of attention heads.
        feed_forward: Channels inside the feed-forward layers.
        lr: Peak learning rate.
        warmup_share: Fraction of the expected steps for warm-up.
        spec_augment_after: Fraction of the expected steps without SpecAugment.
        ctc_weight: Weight of CTC in the loss.
        label_smoothing: Label smoothing of the decoder's loss.
        averaged: Number of last epochs whose final weights are averaged.
        beam: Beam size of the joint search.
        ctc_weight_decode: Weight of CTC in the search scores.
    """

    train: str
    test: str
    out: str
    cpu_s: float
    seed: int = 0
    raw_text: bool = False
    vocab_size: int = 128
    batch_s: float = 20.0
    encoder_layers: int = 4
    decoder_layers: int = 2
    width: int = 144
    heads: int = 4
    feed_forward: int = 576
    lr: float = 1e-3
    warmup_share: float = 0.1
    spec_augment_after: float = 0.032
    ctc_weight: float = 0.3
    label_smoothing: float = 0.1
    averaged: int = 10
    beam: int = 10
    ctc_weight_decode: float = 0.4

    def save(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PeerSettings:
        """Read settings written by `save`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
