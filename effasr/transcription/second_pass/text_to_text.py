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
from effasr.model.asr import ASRModel
from effasr.nn.parameters import evaluating
from effasr.transcription.batching import plan_batches

_SLOTS = 16  # texts that a language model answers at a time


@dataclass(frozen=True, slots=True)
class Written:
    text: str
    truncated: bool


class TextToText:
    """Writes texts from texts, such as translations, in packed batches on the model's device.

    A language model answers them: its instruction is a part of the text.
    """

    def __init__(
        self, model: ASRModel, tokenizer: Tokenizer, config: DecodingConfig | None = None
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
        self.model, self.tokenizer = model, tokenizer
        self._experts = model.config.named_experts(text=True)
        self.config = replace(config, nbest=None, confidence=False)

    def check(self, prompt: Prompt) -> None:
        if self._answers_texts:
            return
        self.tokenizer.prompt(prompt)
        if self._experts is not None:
            self._experts.number_of(prompt)

    def write(self, requests: Sequence[tuple[str, Prompt]]) -> list[Written]:
        """Write a text for each source text and prompt; the order does not matter."""
        if self._answers_texts:
            return self._answers([text for text, _ in requests])
        examples = [
            TextExample(
                str(number),
                [*self.tokenizer.encode(text, prompt.source), self.tokenizer.eos_id],
                self.tokenizer.prompt(prompt),
                [],
                None if self._experts is None else self._experts.number_of(prompt),
            )
            for number, (text, prompt) in enumerate(requests)
        ]
        written: dict[int, Written] = {}
        lengths = [len(item.source) for item in examples]
        budget = self.config.budget_on(next(self.model.parameters()).device)
        most = self.config.max_sequences
        with evaluating(self.model), torch.no_grad():
            for members in plan_batches(lengths, budget, most):
                texts = self._batch([examples[index] for index in members])
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

    def _batch(self, examples: Sequence[TextExample]) -> list[Written]:
        device = next(self.model.parameters()).device
        shape = StaticShape(
            sum(len(item.source) for item in examples),
            sum(len(item.prompt) for item in examples),
            len(examples),
        )
        eos_id, pad_id = self.tokenizer.eos_id, self.tokenizer.pad_id
        batch = collate_text(examples, shape, eos_id=eos_id, pad_id=pad_id).to(device)
        half = self.config.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            prompts = [item.prompt for item in examples]
            decoded = decode(self.model, self.tokenizer, batch, prompts, self.config)
        return [
            Written(self.tokenizer.decode(list(item.tokens)).strip(), item.truncated)
            for item in decoded
        ]
