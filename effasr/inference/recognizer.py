"""From a stream of recordings to a stream of transcripts: load, cut, batch, decode, join."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from effasr.data.batch import Example, collate
from effasr.data.features import SUBSAMPLING
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.inference.batching import plan_batches
from effasr.inference.chunking import Chunk, split_at_pauses
from effasr.inference.decoding_config import DecodingConfig
from effasr.inference.greedy import Decoded, check_words, choose_method, decode
from effasr.inference.prefetch import prefetch
from effasr.inference.results import Failure, Result, Segment, Transcription
from effasr.inference.words import Word, words_of
from effasr.model.asr import ASRModel

_WINDOW_BATCHES = 2
"""Batches' worth of audio which is loaded before batches are planned: sorting needs a choice."""

_WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "km", "my", "bo"})
"""Languages which are written without spaces between words."""


@dataclass(frozen=True, slots=True)
class Request:
    """A recording to transcribe.

    Attributes:
        id: Names it in the result.
        load: Returns float32 (samples,), mono, at the model's sample rate; called on a thread.
            What it raises is reported as the failure of this recording alone.
        prompt: Its languages, and what to do with it.
    """

    id: str
    load: Callable[[], np.ndarray]
    prompt: Prompt


class Recognizer:
    """Transcribes recordings of any length with a model, on the device which holds the model."""

    def __init__(self, model: ASRModel, tokenizer: Tokenizer, config: DecodingConfig | None = None):
        """Check that the model can be decoded as the configuration says.

        Raises:
            ValueError: It lacks what ``config.method`` needs, or the method knows no beam.
        """
        self.model, self.tokenizer = model, tokenizer
        self.config = DecodingConfig() if config is None else config
        self._features = model.config.features
        self._method = choose_method(model, self.config.method, self.config.beam)
        check_words(model, self.config)

    @property
    def sample_rate(self) -> int:
        """Of the audio that a request must load, in Hz."""
        return self._features.sample_rate

    def prompt(self, prompt: Prompt) -> list[int]:
        """What the decoder reads first.

        Raises:
            ValueError: The tokenizer does not know a language, or the prompt asks CTC or the
                transducer to translate.
        """
        if self._method != "attention" and not prompt.monotonic:
            name = {"ctc": "CTC", "transducer": "a transducer"}[self._method]
            raise ValueError(
                f"`task` must be transcribe for {name}, which follows the speech, but is "
                f"{prompt.task}: use method attention."
            )
        if self.config.words and not prompt.monotonic:
            raise ValueError(
                "`words` must be false for a translation, whose words have no place in the speech."
            )
        return self.tokenizer.prompt(prompt)

    def results(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Transcribe recordings, in order, with a bounded amount of audio in memory.

        The model is in evaluation mode while it decodes, and as it was when a result is yielded.
        A recording which cannot be loaded, whose prompt is refused, or of which a chunk alone
        exceeds the GPU's memory gives a `Failure`; the others go on.

        Args:
            requests: Read a little ahead of the results.
        """
        enough = _WINDOW_BATCHES * self.config.frame_budget
        window: list[_Recording] = []
        frames = 0
        for recording in prefetch(self._load, requests, workers=self.config.workers):
            window.append(recording)
            frames += sum(piece.frames for piece in recording.pieces)
            if frames >= enough:
                yield from self._finish(window)
                window, frames = [], 0
        yield from self._finish(window)

    def _load(self, request: Request) -> _Recording:
        recording = _Recording(request, self.sample_rate)
        # Whatever is wrong with one file must not end the transcription of the others.
        try:
            recording.prompt = self.prompt(request.prompt)
            audio = request.load()
            _check(audio)
        except Exception as error:
            # Ours are sentences already; of others the type is half of the message.
            ours = isinstance(error, ValueError)
            recording.failure = str(error) if ours else f"{type(error).__name__}: {error}"
            return recording
        recording.duration = len(audio) / self.sample_rate
        for chunk in self._chunks(audio):
            samples = self._at_least_one_frame(audio[chunk.start : chunk.end])
            frames = self._features.encoder_frames(len(samples))
            recording.pieces.append(_Piece(recording, chunk, samples, frames))
        return recording

    def _chunks(self, audio: np.ndarray) -> list[Chunk]:
        longest, most = self.config.chunk_seconds, self.model.config.encoder.max_frames
        if most is not None:
            longest = min(longest, most * SUBSAMPLING * self._features.hop / self.sample_rate)
        search = min(self.config.search_seconds, longest / 2)
        return split_at_pauses(
            audio, self.sample_rate, chunk_seconds=longest, search_seconds=search
        )

    def _at_least_one_frame(self, audio: np.ndarray) -> np.ndarray:
        missing = self._features.hop * SUBSAMPLING - len(audio)
        return np.pad(audio, (0, missing)) if missing > 0 else audio

    def _finish(self, window: list[_Recording]) -> Iterator[Result]:
        pieces = [piece for recording in window for piece in recording.pieces]
        plan = plan_batches(
            [piece.frames for piece in pieces], self.config.frame_budget, self.config.max_sequences
        )
        with _evaluating(self.model):
            for indices in plan:
                self._decode([pieces[index] for index in indices])
        for recording in window:
            yield recording.result()

    def _decode(self, pieces: list[_Piece]) -> None:
        """Give each piece its text, with batches of half the size where memory runs out."""
        try:
            decoded = self._decode_batch(pieces)
        except torch.OutOfMemoryError:
            decoded = None
        # Not inside `except`, where the traceback would keep the tensors of the failed batch.
        if decoded is None and len(pieces) > 1:
            middle = len(pieces) // 2
            self._decode(pieces[:middle])
            self._decode(pieces[middle:])
        elif decoded is None:
            (piece,) = pieces
            piece.recording.failure = (
                f"out of memory with one chunk of {piece.frames} frames: lower `chunk_seconds`"
            )
        else:
            for piece, result in zip(pieces, decoded, strict=True):
                piece.text = self.tokenizer.decode(list(result.tokens)).strip()
                piece.truncated = result.truncated
                piece.words = self._words(piece, result)

    def _words(self, piece: _Piece, result: Decoded) -> tuple[Word, ...]:
        if result.spans is None:
            return ()
        found = words_of(
            result.tokens,
            result.spans,
            self.tokenizer.decode,
            frame_seconds=self._features.hop * SUBSAMPLING / self.sample_rate,
            offset=piece.chunk.start / self.sample_rate,
            spaces=piece.recording.request.prompt.target not in _WITHOUT_SPACES,
        )
        end = piece.chunk.end / self.sample_rate
        # Frames are rounded up, so the last may reach past the audio.
        return tuple(replace(word, end=min(word.end, end)) for word in found)

    def _decode_batch(self, pieces: list[_Piece]) -> list[Decoded]:
        examples = [
            Example(
                id=piece.recording.request.id,
                audio=piece.audio,
                prompt=piece.recording.prompt,
                text=[],
                monotonic=False,
            )
            for piece in pieces
        ]
        batch = collate(examples, eos_id=self.tokenizer.eos_id, pad_id=self.tokenizer.pad_id)
        prompts = [example.prompt for example in examples]
        device = next(self.model.parameters()).device
        half = self.config.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return decode(self.model, self.tokenizer, batch.to(device), prompts, self.config)


@dataclass(slots=True)
class _Piece:
    """A chunk of a recording, which gets its text when its batch is decoded."""

    recording: _Recording
    chunk: Chunk
    audio: np.ndarray
    frames: int
    text: str = ""
    truncated: bool = False
    words: tuple[Word, ...] = ()


@dataclass(slots=True)
class _Recording:
    request: Request
    sample_rate: int
    duration: float = 0.0
    prompt: list[int] = field(default_factory=list)
    pieces: list[_Piece] = field(default_factory=list)
    failure: str | None = None

    def result(self) -> Result:
        if self.failure is not None:
            return Failure(self.request.id, self.failure)
        rate = self.sample_rate
        segments = tuple(
            Segment(
                piece.chunk.start / rate,
                piece.chunk.end / rate,
                piece.text,
                piece.truncated,
                piece.words,
            )
            for piece in self.pieces
        )
        space = "" if self.request.prompt.target in _WITHOUT_SPACES else " "
        text = space.join(segment.text for segment in segments if segment.text)
        return Transcription(self.request.id, self.duration, text, segments)


def _check(audio: np.ndarray) -> None:
    if audio.ndim != 1 or not len(audio):
        raise ValueError(f"the audio must be mono and not empty, but has shape {audio.shape}")
    if not np.isfinite(audio).all():
        raise ValueError("the audio must be finite, but has NaN or infinite samples")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode that each module had: some may be frozen."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
