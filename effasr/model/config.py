"""Configuration of a speech model: its features, encoder and outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from effasr.checks import check, check_limits
from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.best_rq import BestRQConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_prompt import LanguagePromptConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.nn.experts import ExpertsConfig, named_experts_of
from effasr.nn.lora import LanguageAdapters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a model; the tokenizer determines the size of the vocabulary.

    Attributes:
        features: Log-mel features, or samples.
        spec_augment: SpecAugment, in training only.
        encoder: A FastConformer, Whisper's Transformer or a wav2vec 2.0, selected by its ``kind``.
        decoder: The attention decoder; null for none.
        ctc: Whether the encoder has a CTC head.
        transducer: The transducer; null for none.
        text_encoder: Reads text-only batches, which the decoder translates; null for none.
        language_model: A causal language model that reads the encoder's output within
            conversations; null for none. It is then the only output.
        residual_in_fp32: Whether the sums of the outputs of a stack's modules (the residual stream)
            are float32 where matrix products are not (``training.precision``), as under PyTorch's
            autocast; else they are rounded to the narrow dtype after each addition, which moves 18
            bytes and not 28 for each element of the stream.
        language_prompt: Tells the outputs which language is spoken; null for none.
        best_rq: Pretraining of the encoder on audio alone, in place of all outputs; null for none.
        language_adapters: The languages that have adapters (LoRA), which ``lora.by_language`` sets.
    """

    features: FeatureConfig = field(default_factory=FeatureConfig)
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    encoder: FastConformerConfig | WhisperEncoderConfig | Wav2Vec2EncoderConfig = field(
        default_factory=FastConformerConfig
    )
    decoder: DecoderConfig | None = field(default_factory=DecoderConfig)
    ctc: bool = False
    transducer: TransducerConfig | None = None
    text_encoder: TextEncoderConfig | None = None
    language_model: LanguageModelConfig | None = None
    language_prompt: LanguagePromptConfig | None = None
    residual_in_fp32: bool = True
    best_rq: BestRQConfig | None = None
    language_adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_limits(self)
        if (self.features.kind == "waveform") != isinstance(self.encoder, Wav2Vec2EncoderConfig):
            raise ValueError(
                "`features.kind` must be waveform for an encoder of kind wav2vec2, and for no "
                f"other, but is {self.features.kind} for {self.encoder.kind}: set "
                "features.kind=waveform and features.hop=320, or change `encoder`."
            )
        hop = getattr(self.encoder, "hop", self.features.hop)
        check(self.features.hop == hop, "features.hop", f"be {hop} here", self.features.hop)
        needed, configured = self.encoder.subsampling, self.features.subsampling
        if configured is None:
            object.__setattr__(self, "features", replace(self.features, subsampling=needed))
        elif needed != configured:
            raise ValueError(
                f"`features.subsampling` must be {needed} for this encoder of kind "
                f"{self.encoder.kind}, but is {configured}: leave it out, or change `encoder`."
            )
        causal = isinstance(self.encoder, FastConformerConfig) and self.encoder.causal_subsampling
        if self.features.causal_subsampling and not causal:
            raise ValueError(
                "`features.causal_subsampling` must be false for this encoder, but is true: set "
                "`encoder.causal_subsampling`, which sets both."
            )
        if causal:
            features = replace(self.features, causal_subsampling=True)
            object.__setattr__(self, "features", features)
        if self.best_rq is not None:
            mel = self.features.kind != "waveform"
            rule, remedy = "be null for features of kind waveform", "choose another encoder"
            check(mel, "best_rq", rule, "given", remedy)
            self._check_alone(
                "best_rq",
                "because pretraining on audio alone has no text",
                "leave it out here, and give it to the run that starts from this one with "
                "`init_from`",
            )
        elif self.language_model is not None:
            self._check_alone("language_model", "which is then the only output")
        elif self.decoder is None and not self.ctc and self.transducer is None:
            raise ValueError(
                "`ctc` must be true where `decoder` and `transducer` are null, because the model "
                "needs an output: set `ctc` or give a `decoder` or a `transducer`."
            )
        experts = named_experts_of(self.encoder)
        if self.language_prompt is not None:
            stacks = self.best_rq, self.language_model, self.text_encoder, experts
            alone = not any(stacks) and named_experts_of(self.decoder) is None
            rule = "be null with best_rq, language_model, text_encoder or experts that names choose"
            check(alone, "language_prompt", rule, "given")
        if experts is not None and (self.best_rq or self.language_model):
            raise ValueError(
                "`encoder.experts.route` must be learned with `best_rq` or `language_model`, whose "
                f"audio has no task of its own, but is {experts.route}."
            )
        if self.text_encoder is not None:
            if self.decoder is None and not self.text_encoder.shared_layers:
                raise ValueError(
                    "`decoder` must be given where `text_encoder` is, because nothing else reads "
                    "what it writes: give a `decoder`, or leave `text_encoder` out."
                )
            self.text_encoder.check_width(self.encoder.width)
            self._check_shared(self.text_encoder.shared_layers, experts)
        self._check_named_experts()
        if self.language_adapters:
            others = self.best_rq, self.language_model, self.language_prompt, experts
            alone = not any(others) and named_experts_of(self.decoder) is None
            alone = alone and named_experts_of(self.text_encoder) is None
            rule = "be empty with best_rq, language_model, language_prompt or named experts"
            remedy = "train one adapter for all languages"
            check(alone, "lora.by_language", rule, list(self.language_adapters), remedy)

    def _check_shared(self, count: int, experts: ExpertsConfig | None) -> None:
        name, remedy = "text_encoder.shared_layers", "set text_encoder.shared_layers=0"
        if not count:
            return
        layers, kind = self.encoder.layers, self.encoder.kind
        check(count <= layers, name, f"be at most encoder.layers = {layers}", count)
        is_conformer = isinstance(self.encoder, FastConformerConfig)
        check(is_conformer, name, f"be 0 for an encoder of kind {kind}", count, remedy)
        rule = "be 0 where names choose the encoder's experts, as texts have none of them"
        check(experts is None, name, rule, count, remedy)

    def _check_named_experts(self) -> None:
        """An utterance has one expert's number, which all of its stacks use."""
        decoder = named_experts_of(self.decoder)
        for name in ("encoder", "text_encoder"):
            experts = named_experts_of(getattr(self, name))
            if experts is None or decoder is None:
                continue
            for part in ("route", "names"):
                value, needed = getattr(decoder, part), getattr(experts, part)
                rule = f"be {needed}, that of `{name}.experts`"
                remedy = "one name chooses the experts of an utterance"
                check(value == needed, f"decoder.experts.{part}", rule, value, remedy)

    def numbering(self) -> ExpertsConfig | LanguagePromptConfig | LanguageAdapters | None:
        """Prompts, experts or adapters that names choose: they give its `Batch.expert`."""
        return self.language_prompt or self.named_experts()

    def is_told_language(self, languages: Sequence[str]) -> bool:
        """Whether prompts name the language of speech, one of several ``languages``."""
        return len(languages) > 1 or self.numbering() is not None

    def named_experts(self, *, text: bool = False) -> ExpertsConfig | LanguageAdapters | None:
        """What names choose for speech, or text pairs, by `Batch.expert`."""
        if self.language_adapters:
            return LanguageAdapters(self.language_adapters)
        experts = named_experts_of(self.text_encoder if text else self.encoder)
        return named_experts_of(self.decoder) if experts is None else experts

    def _check_alone(self, name: str, reason: str, remedy: str = "leave it out") -> None:
        for other in ("decoder", "ctc", "transducer", "text_encoder", "language_model"):
            rule = f"be {'false' if other == 'ctc' else 'null'} where `{name}` is given, {reason}"
            check(other == name or not getattr(self, other), other, rule, "given", remedy)
