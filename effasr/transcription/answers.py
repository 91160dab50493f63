"""Answers conversations with a speech language model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from effasr.checkpoint import LoadedModel
from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import read_audio
from effasr.data.conversation.batch import asking, collate_conversations
from effasr.data.conversation.messages import AudioPart, Message, check_turns
from effasr.data.conversation.tokenize import prompt_rows
from effasr.data.filters.rules import Reason, RejectedUtterance
from effasr.data.tokenizer import ChatTokenizer
from effasr.decoding.config import LENGTH_PENALTY
from effasr.decoding.decoded import Decoded
from effasr.decoding.language_model.engine import ConversationEngine
from effasr.model.language_model.architecture import max_rows
from effasr.model.language_model.config import LanguageModelConfig


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    truncated: bool


class Responder:
    """Answers conversations, several at a time; one that ends leaves its slot to the next."""

    def __init__(
        self, loaded: LoadedModel, *, beam: int = 1, max_tokens: int = 256, slots: int = 1
    ) -> None:
        model, tokenizer = loaded.model, loaded.tokenizer
        settings = model.config.language_model
        if settings is None or not isinstance(tokenizer, ChatTokenizer):
            raise ValueError("`loaded` must have a language model and its tokenizer, but has none.")
        assert settings.architecture is not None
        self._model, self._tokenizer = model, tokenizer
        self._settings: LanguageModelConfig = settings
        self._most = max_rows(settings.architecture)
        self._max_tokens = max_tokens
        self._engine = ConversationEngine(
            model,
            tokenizer.stop_ids,
            slots=slots,
            classes=tokenizer.vocab_size,
            beam=beam,
            length_penalty=LENGTH_PENALTY,
        )

    def answer(self, messages: Sequence[Message]) -> Answer:
        self._submit(0, messages)
        ((_, decoded),) = self._engine.results()
        return self._written(decoded)

    def answers(
        self, conversations: Iterable[Sequence[Message] | RejectedUtterance]
    ) -> Iterator[Answer | AudioError | RejectedUtterance]:
        """Answer the last turn of each conversation, in order; reads a little ahead.

        What `answer` would raise stands in the place of its answer, as does why a conversation has
        no turns.
        """
        results: dict[int, Answer | AudioError | RejectedUtterance] = {}
        following = 0
        for number, messages in enumerate(conversations):
            try:
                if isinstance(messages, RejectedUtterance):
                    raise messages
                self._submit(number, messages)
            except (AudioError, RejectedUtterance) as error:
                results[number] = error
            if len(self._engine.unfinished) > self._engine.slots:
                # All slots are taken, and one more conversation is ready for the first that ends.
                ended = self._engine.results(drain=False)
                results |= {name: self._written(decoded) for name, decoded in ended}
            while following in results:
                yield results.pop(following)
                following += 1
        results |= {name: self._written(decoded) for name, decoded in self._engine.results()}
        for number in sorted(results):
            yield results[number]

    @torch.no_grad()
    def _submit(self, name: int, messages: Sequence[Message]) -> None:
        device = next(self._model.parameters()).device
        check_turns(messages)
        if messages[-1].role != "user":
            problem = f"the last turn must be of user, but is of {messages[-1].role}"
            raise RejectedUtterance(Reason.ROLES, problem)
        rate = self._model.config.features.sample_rate
        clips = [
            read_audio(part.path, rate, offset=part.offset or 0.0, duration=part.duration)
            for message in messages
            for part in message.parts
            if isinstance(part, AudioPart)
        ]
        features, most = self._model.config.features, self._model.config.encoder.max_frames
        for clip in clips:
            frames = features.framing.frames(len(clip))
            if not frames:
                seconds = len(clip) / rate
                raise RejectedUtterance(
                    Reason.TOO_SHORT, f"a recording of {seconds:.3g} s has no frame"
                )
            if most is not None and frames > most:
                raise RejectedUtterance(Reason.MODEL, f"{frames} encoder frames, over {most}")
        batch = collate_conversations(
            [asking("question", prompt_rows(messages, self._tokenizer).tolist(), tuple(clips))],
            stack=self._settings.stack,
            pad_id=self._tokenizer.pad_id,
            framing=self._model.config.features.framing,
        )
        rows, limit = batch.token_lengths[0], self._max_tokens
        if self._most is not None:
            if rows >= self._most:
                reason = f"{rows} rows, but the language model has at most {self._most}"
                raise RejectedUtterance(Reason.MODEL, reason)
            limit = min(limit, self._most - rows)
        self._engine.submit(batch.to(device), [limit], [name])

    def _written(self, decoded: Decoded) -> Answer:
        return Answer(self._tokenizer.decode(decoded.tokens).strip(), decoded.truncated)
