"""Texts written from texts, by a model with a text encoder or a language model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from effasr.checkpoint import LoadedModel
from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.checks import check_config
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded, EncodedBatch, with_scores
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.nn.experts import ExpertsConfig
from effasr.nn.parameters import evaluating
from effasr.transcription.batching import plan_batches
from effasr_kernels import PackedSequence

_SLOTS = 16  # texts that a language model answers at a time


@dataclass(frozen=True, slots=True)
class Written:
    text: str
    truncated: bool
    # Log-probability of the text minus that of the other one that was given to compare, in nats; 0
    # where both are equal, None where the model cannot write the other one.
    gain: float | None = None


def source_of(config: ModelConfig, source: str | None) -> str | None:
    """Return the source whose experts a corrector uses: the named one, or the only one."""
    experts = config.named_experts(text=True)
    if not isinstance(experts, ExpertsConfig) or experts.route != "source":
        rule = "be left out for a corrector without an expert for each source"
        check(source is None, "corrector_source", rule, repr(source))
        return None
    if source is None and experts.count == 1:
        return experts.names[0]
    rule = f"be one of {', '.join(experts.names)}"
    remedy = "the corrector has an expert for each: name the one whose lists are like these"
    check(source in experts.names, "corrector_source", rule, repr(source), remedy)
    return source


class TextToText:
    """Writes texts from texts, such as translations, in packed batches on the model's device.

    A language model answers them: its instruction is a part of the text.
    """

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        source: str | None = None,
    ) -> None:
        self._answers_texts = model.config.language_model is not None
        reads = self._answers_texts or model.config.text_encoder is not None
        check(reads, "model.text_encoder", "be given to read texts", None)
        method: Any = "language_model" if self._answers_texts else "attention"
        config = replace(config or DecodingConfig(), method=method)
        check_config(model, config)
        for name in ("ctc_weight", "words", "word_confidence", "score_parts", "second_lm"):
            value = getattr(config, name)
            check(not value, name, "be left out to read texts, which have no audio", value)
        self.model, self.tokenizer, self.source = model, tokenizer, source
        self._experts = model.config.named_experts(text=True)
        self.config = replace(config, nbest=None, confidence=not self._answers_texts)

    def check(self, prompt: Prompt, source: str | None = None) -> None:
        if self._answers_texts:
            return
        self.tokenizer.prompt(prompt)
        self._expert(prompt, source)

    def write(
        self,
        requests: Sequence[tuple[str, Prompt]],
        transcripts: Sequence[str] | None = None,  # texts whose log-probabilities are compared
        *,
        sources: Sequence[str | None] | None = None,  # by default ``self.source``
    ) -> list[Written]:
        """Write a text for each source text and prompt; the order does not matter."""
        if self._answers_texts:
            return self._answers([text for text, _ in requests])
        sources = [None] * len(requests) if sources is None else sources
        examples = [
            TextExample(
                str(number),
                [*self.tokenizer.encode(text, prompt.source), self.tokenizer.eos_id],
                self.tokenizer.prompt(prompt),
                [],
                self._expert(prompt, source),
            )
            for number, ((text, prompt), source) in enumerate(zip(requests, sources, strict=True))
        ]
        targets = None
        if transcripts is not None:
            pairs = zip(transcripts, requests, strict=True)
            targets = [self.tokenizer.encode(text, prompt.target) for text, (_, prompt) in pairs]
        written: dict[int, Written] = {}
        lengths = [len(item.source) for item in examples]
        budget = self.config.budget_on(next(self.model.parameters()).device)
        most = self.config.max_sequences
        with evaluating(self.model), torch.no_grad():
            for members in plan_batches(lengths, budget, most):
                group = [examples[index] for index in members]
                compared = None if targets is None else [targets[index] for index in members]
                same = None if transcripts is None else [transcripts[index] for index in members]
                texts = self._batch(group, compared, same)
                written.update(zip(members, texts, strict=True))
        return [written[index] for index in range(len(examples))]

    def _answers(self, texts: Sequence[str]) -> list[Written]:
        # Imported here, because transformers takes seconds.
        from effasr.data.conversation.messages import Message
        from effasr.transcription.answers import Responder

        tokens = max((len(self.tokenizer.encode(text, "")) for text in texts), default=1)
        with evaluating(self.model):
            responder = Responder(
                LoadedModel(self.model, self.tokenizer, Prompt()),
                beam=self.config.beam,
                max_tokens=self.config.max_tokens(tokens),
                slots=min(self.config.max_sequences, _SLOTS),
            )
            written = []
            for answer in responder.answers([Message("user", (text,))] for text in texts):
                if isinstance(answer, Exception):
                    raise answer
                written.append(Written(answer.text, answer.truncated))
        return written

    def _expert(self, prompt: Prompt, source: str | None) -> int | None:
        """Return the number of the expert for a text; None where no name chooses it."""
        if self._experts is None:
            return None
        return self._experts.number_of(prompt, self.source if source is None else source)

    def _batch(
        self,
        examples: Sequence[TextExample],
        targets: Sequence[list[int]] | None,
        transcripts: Sequence[str] | None,
    ) -> list[Written]:
        device = next(self.model.parameters()).device
        shape = StaticShape(
            sum(len(item.source) for item in examples),
            sum(len(item.prompt) for item in examples),
            len(examples),
        )
        eos_id, pad_id = self.tokenizer.eos_id, self.tokenizer.pad_id
        batch = collate_text(examples, shape, eos_id=eos_id, pad_id=pad_id).to(device)
        prompts = [item.prompt for item in examples]
        half = self.config.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            decoded = decode(self.model, self.tokenizer, batch, prompts, self.config)
            scores: list[float | None] = [None] * len(examples)
            if targets is not None:
                scores = self._log_probs(self.model.encode(batch), prompts, targets)
        texts = [self.tokenizer.decode(list(item.tokens)).strip() for item in decoded]
        written = []
        for number, (item, text, score) in enumerate(zip(decoded, texts, scores, strict=True)):
            assert item.score is not None  # config.confidence
            gain = None if score is None else item.score.log_prob - score
            if transcripts is not None and text == transcripts[number]:
                gain = 0.0
            written.append(Written(text, item.truncated, gain))
        return written

    def _log_probs(
        self, encoded: PackedSequence, prompts: Sequence[Sequence[int]], texts: Sequence[list[int]]
    ) -> list[float | None]:
        """Return the log-probability of each text; None if it cannot be spelt or is too long."""
        decoder = self.model.config.decoder
        assert decoder is not None
        can_write = [
            len(prompt) + len(text) <= decoder.max_positions
            and not self.tokenizer.count_unknown(text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        plain = [
            Decoded(tuple(text) if ok else ()) for text, ok in zip(texts, can_write, strict=True)
        ]
        batch = EncodedBatch(self.model, "attention", encoded, prompts, self.tokenizer.eos_id)
        scored = with_scores(batch, plain)
        return [
            item.score.log_prob if ok and item.score is not None else None
            for item, ok in zip(scored, can_write, strict=True)
        ]
