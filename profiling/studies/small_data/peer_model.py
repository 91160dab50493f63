"""A SpeechBrain model assembled from its own modules as in its recipes; imports SpeechBrain."""

from __future__ import annotations

import torch
from speechbrain.augment.augmenter import Augmenter  # pyright: ignore[reportMissingImports]
from speechbrain.augment.freq_domain import (  # pyright: ignore[reportMissingImports]
    SpectrogramDrop,
    Warping,
)
from speechbrain.decoders.scorer import (  # pyright: ignore[reportMissingImports]
    CTCScorer,
    ScorerBuilder,
)
from speechbrain.decoders.seq2seq import (  # pyright: ignore[reportMissingImports]
    S2STransformerBeamSearcher,
)
from speechbrain.lobes.features import Fbank  # pyright: ignore[reportMissingImports]
from speechbrain.lobes.models.convolution import (  # pyright: ignore[reportMissingImports]
    ConvolutionFrontEnd,
)
from speechbrain.lobes.models.transformer.TransformerASR import (  # pyright: ignore[reportMissingImports]
    TransformerASR,
)
from speechbrain.nnet.linear import Linear  # pyright: ignore[reportMissingImports]
from speechbrain.nnet.losses import ctc_loss, kldiv_loss  # pyright: ignore[reportMissingImports]
from speechbrain.processing.features import (  # pyright: ignore[reportMissingImports]
    InputNormalization,
)
from torch import Tensor, nn

from small_data.peer_settings import PeerSettings

BLANK, BOS, EOS = 0, 1, 2
_MELS = 80


class Peer(nn.Module):
    """Computes losses and tokens from features.

    Args:
        settings: Model sizes and loss weights.
        vocabulary: Number of tokens, including blank, begin and end.
    """

    def __init__(self, settings: PeerSettings, vocabulary: int) -> None:
        super().__init__()
        self.settings = settings
        self.features = Fbank(sample_rate=16_000, n_fft=400, n_mels=_MELS)
        self.normalize = InputNormalization(norm_type="global", update_until_epoch=4)
        self.cnn = ConvolutionFrontEnd(
            input_shape=(8, 10, _MELS),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=(64, 32),
            kernel_sizes=(3, 3),
            strides=(2, 2),
            residuals=(False, False),
        )
        self.transformer = TransformerASR(
            tgt_vocab=vocabulary,
            input_size=_MELS // 4 * 32,
            d_model=settings.width,
            nhead=settings.heads,
            num_encoder_layers=settings.encoder_layers,
            num_decoder_layers=settings.decoder_layers,
            d_ffn=settings.feed_forward,
            dropout=0.1,
            activation=nn.GELU,
            encoder_module="conformer",
            attention_type="RelPosMHAXL",
            normalize_before=True,
            causal=False,
        )
        self.ctc = Linear(input_size=settings.width, n_neurons=vocabulary)
        self.out = Linear(input_size=settings.width, n_neurons=vocabulary)
        self.augment = Augmenter(
            min_augmentations=3,
            max_augmentations=3,
            augmentations=[
                SpectrogramDrop(15, 25, 3, 3, replace="zeros", dim=1),
                SpectrogramDrop(25, 35, 2, 2, replace="zeros", dim=2),
                Warping(),
            ],
        )

    def loss(
        self, audio: Tensor, lengths: Tensor, texts: list[list[int]], *, epoch: int, augment: bool
    ) -> tuple[Tensor, float]:
        """Return the loss of a batch, and its CTC loss per token.

        Args:
            audio: float32 (B, samples), padded with zeros.
            lengths: float32 (B,), lengths relative to the longest.
            texts: Token ids of each utterance.
            epoch: Number of the epoch, counted from 1.
            augment: Whether to apply SpecAugment.
        """
        features = self.normalize(self.features(audio), lengths, epoch=epoch)
        if augment:
            features, lengths = self.augment(features, lengths)
        begun, _ = _padded([[BOS, *text] for text in texts])
        ended, ended_lengths = _padded([[*text, EOS] for text in texts])
        plain, plain_lengths = _padded(texts)
        encoded, decoded = self.transformer(self.cnn(features), begun, lengths, pad_idx=BLANK)
        ctc = ctc_loss(
            self.ctc(encoded).log_softmax(-1), plain, lengths, plain_lengths, BLANK, "batchmean"
        )
        attention = kldiv_loss(
            self.out(decoded).log_softmax(-1),
            ended,
            length=ended_lengths,
            label_smoothing=self.settings.label_smoothing,
            reduction="batchmean",
        )
        weight = self.settings.ctc_weight
        per_token = ctc.item() * len(texts) / max(1, sum(map(len, texts)))
        return weight * ctc + (1 - weight) * attention, per_token

    @torch.no_grad()
    def encode(self, audio: Tensor, lengths: Tensor) -> Tensor:
        """Return encoder frames, (B, T, width)."""
        features = self.normalize(self.features(audio), lengths)
        return self.transformer.encode(self.cnn(features), lengths)

    def searcher(self) -> S2STransformerBeamSearcher:
        """Return a joint attention and CTC beam search."""
        settings = self.settings
        scorer = ScorerBuilder(
            full_scorers=[CTCScorer(ctc_fc=self.ctc, blank_index=BLANK, eos_index=EOS)],
            weights={"ctc": settings.ctc_weight_decode},
        )
        return S2STransformerBeamSearcher(
            modules=[self.transformer, self.out],
            bos_index=BOS,
            eos_index=EOS,
            min_decode_ratio=0.0,
            max_decode_ratio=1.0,
            beam_size=settings.beam,
            using_eos_threshold=False,
            length_normalization=True,
            scorer=scorer,
        )

    def greedy_ctc(self, encoded: Tensor) -> list[int]:
        """Return the token ids of one utterance from frames (1, T, width)."""
        best = self.ctc(encoded)[0].argmax(-1).unique_consecutive()
        return [token for token in best.tolist() if token != BLANK]


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens (B, longest), and lengths relative to the longest, (B,)."""
    longest = max(map(len, rows))
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens, torch.tensor([len(row) / longest for row in rows])
