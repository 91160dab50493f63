"""What the peer is trained with; read by a process that has SpeechBrain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """A CTC + attention Conformer of SpeechBrain; the defaults are its recipes' for small models.

    Those are LibriSpeech's ``conformer_small`` and CommonVoice's ``conformer_large``, whose steps
    and sizes are scaled to the corpus: there, 300 s of audio in a batch and 25,000 of 250,000 steps
    of warm-up, 8,000 of them before SpecAugment.

    Attributes:
        train: Manifest to train on.
        test: Manifest to transcribe.
        out: Folder for results.
        cpu_s: CPU seconds of training.
        seed: Of weights, order and augmentation.
        raw_text: Whether texts are trained on as they are. Otherwise in lower case and without
            punctuation, as its recipes prepare them.
        vocab_size: Pieces of the unigram model of SentencePiece.
        batch_s: Most seconds of audio of a batch.
        encoder_layers: Of the Conformer.
        decoder_layers: Of the Transformer.
        width: Channels.
        heads: Of attention.
        feed_forward: Channels inside of feed-forward networks.
        lr: Highest learning rate.
        warmup_share: Of the expected steps.
        spec_augment_after: Share of the expected steps without SpecAugment.
        ctc_weight: Of the loss.
        label_smoothing: Of the decoder's loss.
        averaged: Weights of the ends of epochs that are averaged.
        beam: Hypotheses of the joint search.
        ctc_weight_decode: Share of CTC in its scores.
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
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PeerSettings:
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
