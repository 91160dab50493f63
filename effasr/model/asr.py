"""The speech model: features, encoder, CTC head, transducer and attention decoder."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check
from effasr.data.batch import IGNORED, Batch
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.features.log_mel import LogMel, MelFrames
from effasr.data.features.samples import Samples
from effasr.data.features.spec_augment import spec_augment
from effasr.model.best_rq import BestRQ, RandomQuantizer
from effasr.model.config import ModelConfig
from effasr.model.decoder import Decoder
from effasr.model.encoder import FastConformerEncoder
from effasr.model.language_prompt import LanguagePrompt
from effasr.model.losses import Losses, gather_losses
from effasr.model.text_encoder import TextEncoder
from effasr.model.transducer import Transducer
from effasr.model.wav2vec2_encoder import Wav2Vec2Encoder, Wav2Vec2EncoderConfig
from effasr.model.whisper_encoder import WhisperEncoder, WhisperEncoderConfig
from effasr.nn.attention import RelativeSelfAttention
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.convolution import BatchNorm, DepthwiseConv
from effasr.nn.experts import EncoderOutput, ExpertFeedForward, GroupedLinear, Router, take_losses
from effasr.nn.linear import Linear
from effasr.nn.lora import adapt_by_language, route_rows
from effasr.nn.parameters import evaluate_frozen, touch_unused_parameters
from effasr.nn.predictor import LSTMPredictor, StatelessPredictor
from effasr.nn.stack import is_empty, join_skipped, skip_branch
from effasr_kernels import (
    PackedSequence,
    best_alignment_loss,
    ctc_loss,
    linear_cross_entropy,
)

if TYPE_CHECKING:
    from effasr.model.language_model.model import LanguageModel

# Without the embeddings: the decoder, which ties its own to its output, and the predictors
# initialize theirs.
_RESETTABLE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.LayerNorm,
    BatchNorm,
    BestRQ,
    Decoder,
    DepthwiseConv,
    ExpertFeedForward,
    GroupedLinear,
    LogMel,
    LSTMPredictor,
    RandomQuantizer,
    RelativeSelfAttention,
    Router,
    StatelessPredictor,
    TextEncoder,
    Wav2Vec2Encoder,
    WhisperEncoder,
)


_ONEDNN_ENTRIES = 64  # of each cache: more than the shapes of one batch, in which layers repeat


@dataclass(frozen=True, slots=True)
class Durations:
    """Of the training utterances: models do not generalise to longer ones, nor to long pauses."""

    typical: float  # seconds, the median
    longest: float  # seconds


class ASRModel(nn.Module):
    """Speech model over packed batches, with up to three outputs.

    Without a CTC head, and where `effasr.interop.huggingface.checkpoint` can express the
    configuration, this is the function of transformers' ``CanaryForConditionalGeneration`` or
    ``WhisperForConditionalGeneration``.
    """

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        # Limit the caches of oneDNN and of ideep, unless the environment sets their capacity.
        # oneDNN compiles code for each shape and keeps that of the last 1024 shapes. A packed
        # batch seldom has the length of another one, so that hardly an entry is used in a later
        # batch, and a process grows by hundreds of megabytes in its first thousand batches. Both
        # libraries read the environment at their first operation; a later call has no effect.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, str(_ONEDNN_ENTRIES))
        check(vocab_size >= 1, "vocab_size", "be at least 1", vocab_size)
        self.config, self.vocab_size = config, vocab_size
        self.durations: Durations | None = None  # None where they are unknown
        self.masks_on: Tensor | None = None  # bool (), of SpecAugment that begins late
        mel = config.features.kind != "waveform"
        self.features = LogMel(config.features) if mel else Samples(config.features)
        stream = {"residual_in_fp32": config.residual_in_fp32}
        self.encoder: FastConformerEncoder | WhisperEncoder | Wav2Vec2Encoder
        if isinstance(config.encoder, Wav2Vec2EncoderConfig):
            self.encoder = Wav2Vec2Encoder(config.encoder, config.spec_augment, **stream)
        elif isinstance(config.encoder, WhisperEncoderConfig):
            self.encoder = WhisperEncoder(config.encoder, config.features.mel_bins, **stream)
        else:
            self.encoder = FastConformerEncoder(config.encoder, config.features.mel_bins, **stream)
        width = config.encoder.width
        self.language_prompt = None
        if config.language_prompt is not None:
            self.language_prompt = LanguagePrompt(config.language_prompt, width)
        self.ctc_head = nn.Linear(width, vocab_size + 1) if config.ctc else None
        self.ctc_backend: str | None = None
        self.transducer = None
        if config.transducer is not None:
            self.transducer = Transducer(config.transducer, width, vocab_size)
        self.decoder = None
        if config.decoder is not None:
            self.decoder = Decoder(config.decoder, vocab_size, **stream)
        self.projection = None
        if config.decoder is not None and config.decoder.width != width:
            self.projection = Linear(width, config.decoder.width)
        self.text_encoder = None
        if config.text_encoder is not None:
            self.text_encoder = TextEncoder(config.text_encoder, width, vocab_size, **stream)
        self.language_model: LanguageModel | None = None
        if config.language_model is not None:
            # Imported here, because transformers takes seconds.
            from effasr.model.language_model.encoder_decoder import build_language_model

            self.language_model = build_language_model(config.language_model, width)
        self.best_rq = None
        if config.best_rq is not None:
            self.best_rq = BestRQ(config.best_rq, config.features, width)
        self.reset_parameters()

    @classmethod
    def from_state_dict(
        cls, config: ModelConfig, vocab_size: int, state: Mapping[str, Tensor]
    ) -> Self:
        """Build a model around these tensors, without initializing or copying weights."""
        with torch.device("meta"):
            model = cls(config, vocab_size)
            if config.language_adapters:
                adapt_by_language(model, config.language_adapters, state)
        model.load_state_dict(state, assign=True)
        if model.language_model is not None:
            model.language_model.reset_tables()
        for parameter in model.parameters():
            parameter.requires_grad_()
        return model

    @contextmanager
    def window(self, seconds: float) -> Iterator[None]:
        """Within the context, let a Whisper hear silence up to ``seconds`` behind an utterance."""
        config = self.config
        features = replace(config.features, minimum_s=seconds)
        try:
            self.config = replace(config, features=features)
            self.features.config = features
            yield
        finally:
            self.config, self.features.config = config, config.features

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize every weight and compute every table; needed after ``to_empty``.

        Linear layers are Xavier-uniform with zero biases, for a signal of equal size at every
        depth; convolutions are initialized as in torch. Embeddings have variance 1 / width, so that
        a tied output layer starts with logits of variance 1. A language model has the weights of
        its own initialization.
        """
        foreign = set() if self.language_model is None else self.language_model.foreign_modules()
        for module in self.modules():
            if module in foreign:
                continue
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, _RESETTABLE):
                module.reset_parameters()

    def train(self, mode: bool = True) -> Self:
        """Set the mode; modules whose parameters are all frozen stay in evaluation mode."""
        super().train(mode)
        if mode:
            evaluate_frozen(self)
        return self

    def forward(
        self,
        batch: Batch,
        *,
        label_smoothing: float = 0.0,
        guided_sigma: float | None = None,
        consistency: bool = False,
    ) -> Losses:
        """Sums of the losses, which the caller weights and divides by the counts of the whole step.

        ``guided_sigma``: width of the unpenalized diagonal of guided attention, as a share of the
        utterance; None for no penalty. ``consistency``: whether the text encoder reads transcripts,
        from which speech should not be distant.
        """
        if self.language_model is not None:
            return self._converse(batch, label_smoothing)
        if self.best_rq is not None:
            return self._pretrain(self.best_rq, batch)
        distances: list[Tensor] | None = [] if consistency else None
        encoded = self.encode(batch, distances)
        # Called through the module, so that sharded layers gather their parameters.
        passed = [encoded.values]
        cross_entropy = penalty = ctc = transducer = None
        is_speech = batch.source is None
        if is_speech and self.text_encoder is not None:
            self.text_encoder.learn_durations(batch.text, batch.frames)
        is_aligned = is_speech or self.shared_layers > 0
        if self.ctc_head is not None and is_aligned:
            with ranges.range("ctc"):
                ctc = ctc_loss(
                    encoded.values,
                    self.ctc_head.weight,
                    batch.text.values,
                    encoded.layout,
                    batch.text.layout,
                    bias=self.ctc_head.bias,
                    blank_id=self.vocab_size,
                    backend=self.ctc_backend,
                )
        if self.transducer is not None and is_aligned:
            with ranges.range("transducer"):
                transducer = self.transducer(encoded, batch.text, batch.node_budget)
        if self.decoder is not None:
            sigma = guided_sigma if is_speech else None
            hidden, penalty = self.decode(batch.tokens, encoded, guided_sigma=sigma)
            passed.append(hidden)
            cross_entropy = _cross_entropy(self.decoder, hidden, batch, label_smoothing)
        losses = gather_losses(
            batch,
            cross_entropy=cross_entropy,
            ctc=ctc,
            transducer=transducer,
            penalty=penalty,
            distance=distances[0] if distances else None,
        )
        idle: list[Tensor] = list(self._idle(is_speech))
        if is_empty(batch.frames, batch.tokens.layout):
            idle = [*self.parameters(), *passed]
        return self._reaching(idle, losses, batch)

    def _reaching(self, idle: list[Tensor], losses: Losses, batch: Batch) -> Losses:
        """Losses with those of routers, whose backward also gives idle parameters a gradient."""
        losses = replace(losses, router=self._router_loss(lambda: (batch.targets != IGNORED).sum()))
        # An operation on an empty batch may leave its weights out of the graph, but the processes
        # of a group wait for the gradient of every parameter.
        if idle:
            reached = touch_unused_parameters(losses.cross_entropy, idle)
            losses = replace(losses, cross_entropy=reached)
        return losses

    def _converse(self, batch: Batch, label_smoothing: float) -> Losses:
        model = self.language_model
        assert model is not None
        hidden = self.converse(batch)
        cross_entropy = _cross_entropy(model, hidden, batch, label_smoothing)
        without_speech = isinstance(batch, ConversationBatch) and is_empty(batch.clip_frames)
        idle: list[Tensor] = []
        if is_empty(batch.tokens.layout):
            idle = [*self.parameters(), hidden]
        elif without_speech:
            idle = [*self.encoder.parameters(), *model.adapter.parameters()]
        return self._reaching(idle, gather_losses(batch, cross_entropy=cross_entropy), batch)

    def converse(self, batch: Batch) -> Tensor:
        """Hidden states of the language model over whole conversations: (U, width)."""
        model = self.language_model
        if model is None:
            raise ValueError("`language_model` must be given for conversations, but is null.")
        if not isinstance(batch, ConversationBatch):
            raise ValueError(
                "`batch` must be a ConversationBatch for a model with a language model, but is a "
                f"{type(batch).__name__}: train and evaluate on manifests of conversations."
            )
        encoded = None
        if not is_empty(batch.clip_frames):
            encoded = self.encode(batch).values
        x = model.embed(batch, encoded)
        if encoded is None:
            x = join_skipped(x, skip_branch([*self.encoder.children(), model.adapter], x))
        with ranges.range("language_model"):
            return model(x, batch.tokens.layout, batch)

    def _pretrain(self, best_rq: BestRQ, batch: Batch) -> Losses:
        """The loss of BEST-RQ as the cross-entropy, whose targets are frames."""
        with ranges.range("features"):
            mel = self.features(batch.audio, batch.frames.with_tile_tables())
            values, masked = best_rq.mask(mel, self._augmented(mel).values)
        with ranges.range("encoder"):
            encoded = self.encoder(mel.with_values(values))
        losses = best_rq(mel, masked, encoded)
        total = losses.sum()
        if is_empty(batch.frames):
            total = touch_unused_parameters(total, self.parameters())
        zero = torch.zeros((), device=total.device)
        router = self._router_loss(lambda: batch.frames.cu_seqlens[-1])
        return Losses(total, zero, zero, zero, zero, per_utterance=losses.detach(), router=router)

    def _router_loss(self, targets: Callable[[], Tensor]) -> Tensor | None:
        """Losses of the routers of the last forward times ``targets``, see `Losses`."""
        stacks = [x for x in (self.encoder, self.text_encoder, self.decoder) if x is not None]
        losses = [x for x in map(take_losses, stacks) if x is not None]
        return torch.stack(losses).sum() * targets() if losses else None

    def _augmented(self, mel: MelFrames) -> MelFrames:
        if not self.training:
            return mel
        return mel.with_values(spec_augment(mel, self.config.spec_augment, self.masks_on))

    @property
    def shared_layers(self) -> int:
        text = self.config.text_encoder
        return 0 if text is None else text.shared_layers

    def _only_of_speech(self) -> list[nn.Module]:
        """The parts of the encoder that texts do not pass, in order."""
        first = len(self.encoder.layers) - self.shared_layers
        parts = self.encoder.children()
        return [x[:first] if isinstance(x, nn.ModuleList) else x for x in parts]

    def _idle(self, is_speech: bool) -> Iterator[nn.Parameter]:
        of_speech = [*self._only_of_speech()]
        if not self.shared_layers:
            of_speech += [x for x in (self.ctc_head, self.transducer) if x is not None]
        for module in (self.text_encoder,) if is_speech else of_speech:
            if module is not None:
                yield from module.parameters()

    def encode(self, batch: Batch, distances: list[Tensor] | None = None) -> EncoderOutput:
        """The encoder output (T, encoder width), with SpecAugment in training, or that of texts.

        If a list is given, the distances of speech from its transcripts are appended to it, (N,).
        """
        if batch.source is not None:
            return self._encode_text(batch.source, batch.expert)
        audio, frames = batch.audio, batch.frames
        if isinstance(batch, ConversationBatch):
            audio, frames = batch.clips, batch.clip_frames
        with ranges.range("features"):
            mel = self.features(audio, frames.with_tile_tables())
            if isinstance(mel, MelFrames):
                mel = self._augmented(mel)
        with ranges.range("encoder"):
            beside = partial(self._beside_text_encoder, batch, distances)
            route_rows(self.encoder, batch.expert, frames)
            if isinstance(self.encoder, FastConformerEncoder):
                encoded = self.encoder(mel, batch.expert, beside, self.shared_layers)
            else:
                encoded = self.encoder(mel)
                encoded = encoded.with_values(beside(encoded))
            encoded = EncoderOutput(encoded.values, encoded.layout, batch.expert)
            return encoded if self.language_prompt is None else self.language_prompt(encoded)

    def _encode_text(self, source: PackedSequence, expert: Tensor | None) -> EncoderOutput:
        text = self.text_encoder
        if text is None:
            raise ValueError(
                "`text_encoder` must be given for text-only batches, but this model has none."
            )
        read = text(source, self._only_of_speech(), expert)
        if self.shared_layers:
            assert isinstance(self.encoder, FastConformerEncoder)
            read = text.upsampled(read, source.values)
            route_rows(self.encoder, expert, read.layout)
            read = self.encoder.encode_text(read, self.shared_layers)
        return EncoderOutput(read.values, read.layout, expert)

    def _beside_text_encoder(
        self, batch: Batch, distances: list[Tensor] | None, speech: PackedSequence
    ) -> Tensor:
        """What the layers that texts share read of speech: where text encoders run, or would."""
        # Processes gather sharded layers in one order, whether their batches are speech or text.
        text = self.text_encoder
        if text is None:
            return speech.values
        if distances is None:
            return join_skipped(speech.values, skip_branch(text.children(), speech.values))
        read = text(batch.text, expert=batch.expert)
        # Tokens may be passed by and repeated, so that upsampling them would change nothing.
        values = read.values.to(speech.values.dtype)
        layouts = speech.layout, read.layout
        distances.append(best_alignment_loss(speech.values, values, *layouts))
        return speech.values

    def decode(
        self,
        tokens: PackedSequence,
        encoded: PackedSequence,
        *,
        guided_sigma: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states (U, decoder width) of whole transcripts, and the penalty of each token."""
        # tokens: int64 (U,), prompts and transcripts -> (U, decoder width), (U,)
        with ranges.range("decoder"):
            tokens = PackedSequence(tokens.values, tokens.layout.with_tile_tables())
            return self._decoder()(tokens, self.projected(encoded), guided_sigma)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the decoder's hidden states: (..., width) to (..., V)."""
        return self._decoder().logits(hidden)

    def ctc_logits(self, encoded: Tensor) -> Tensor:
        """Logits of every token and, last, the blank: (T, C) to (T, V + 1)."""
        if self.ctc_head is None:
            raise ValueError("`ctc` must be true for CTC scores, but this model has no CTC head.")
        return self.ctc_head(encoded)

    def start_decoding(
        self,
        encoded: PackedSequence,
        max_tokens: int,
        read: Sequence[Sequence[int]] | None = None,
    ) -> DecoderState:
        return self._decoder().start(self.projected(encoded), max_tokens, read)

    def decode_step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        return self._decoder().step(tokens, state)

    def _decoder(self) -> Decoder:
        if self.decoder is None:
            raise ValueError("`decoder` must be given for decoding, but this model has none.")
        return self.decoder

    def projected(self, encoded: PackedSequence) -> PackedSequence:
        if self.projection is None:
            return encoded
        return encoded.with_values(self.projection(encoded.values))


def _cross_entropy(
    head: "Decoder | LanguageModel", hidden: Tensor, batch: Batch, label_smoothing: float
) -> Tensor:
    with ranges.range("cross_entropy"):
        return linear_cross_entropy(
            hidden,
            head.output_weight,
            batch.targets,
            bias=head.output_bias,
            label_smoothing=label_smoothing,
            # `gather_losses` uses the sum; per utterance it has no gradient.
            uniform_gradient=True,
        )
