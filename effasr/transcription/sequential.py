"""Whisper's sequential decoding: windows that begin where the times of the one before end."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from effasr.data.batch import Batch
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode, next_token_scores
from effasr.decoding.decoded import Decoded
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.timestamps import timestamp_rules
from effasr.model.asr import ASRModel
from effasr.transcription.decode_queue import Named, SingleBatches
from effasr.transcription.inputs.chunking import MARGIN_SECONDS, Ahead, Chunk
from effasr.transcription.inputs.vad import Detector, hop_samples
from effasr.transcription.recordings import Piece

# Those of https://github.com/openai/whisper (transcribe.py).
_TEMPERATURES = 0.2, 0.4, 0.6, 0.8, 1.0  # tried in order while the text is not accepted
_MOST_COMPRESSION = 2.4  # of a text that does not repeat itself
_LEAST_LOG_PROB = -1.0  # nats a token, of a text that is probably right
_NO_SPEECH = 0.6  # probability above which an unlikely text is none
_CONTEXT_TEMPERATURE = 0.5  # above which the text is no context of what follows


def windows(
    blocks: Iterable[np.ndarray],
    sample_rate: int,
    detect: Detector,
    window_seconds: float,
    gap_seconds: float | None,
    advance: Callable[[], int],
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Yield windows of a recording while it is being read.

    ``advance`` says, once a window is decoded, after how many of its samples the next one begins.
    Stretches without speech of at least ``gap_seconds`` before a window are skipped.
    """
    ahead, start, longest = Ahead(blocks), 0, int(window_seconds * sample_rate)
    hop, margin = hop_samples(sample_rate), round(MARGIN_SECONDS * sample_rate)
    while True:
        ahead.fill(longest)
        samples, share = ahead.samples[:longest], 1.0
        if not len(samples):
            return
        quiet = 0
        if gap_seconds is not None:
            speech = detect(samples)
            places, share = np.flatnonzero(speech), float(speech.mean())
            before = max(0, int(places[0]) * hop - margin) if len(places) else len(samples)
            quiet = before if not len(places) or before >= gap_seconds * sample_rate else 0
        if not quiet:
            yield Chunk(start, start + len(samples), share), samples
        step = quiet or advance()
        ahead.take(step)
        start += step


class SequentialBatches(SingleBatches):
    """Decodes a window of each of several recordings, with Whisper's fallbacks."""

    def __init__(
        self,
        model: ASRModel,
        tokenizer: Tokenizer,
        config: DecodingConfig,
        boost: BoostTree | None,
        collate: Callable[[list[Piece]], tuple[Batch, list[list[int]]]],
        sample_rate: int,
    ) -> None:
        super().__init__(model, tokenizer, replace(config, timestamps=True, nbest=1), None, boost)
        self._stamps = timestamp_rules(model, tokenizer).tokens
        self._collate, self._rate = collate, sample_rate
        assert model.config.decoder is not None
        self._most_context = model.config.decoder.max_positions // 2 - 1

    def feed(
        self, batch: Batch, prompts: Sequence[list[int]], names: Sequence[Any]
    ) -> Iterator[Named]:
        prompts = [self._with_context(*pair) for pair in zip(names, prompts, strict=True)]
        results = decode(
            self._model, self._tokenizer, batch, prompts, self._config, None, self._boost
        )
        for piece, prompt, result in zip(names, prompts, results, strict=True):
            yield piece, self._advanced(piece, *self._accepted(piece, prompt, result))

    def _with_context(self, piece: Piece, prompt: list[int]) -> list[int]:
        context = piece.recording.context[-self._most_context :]
        if not context or not self._config.previous_text or self._stamps.previous is None:
            return prompt
        return [self._stamps.previous, *context, *prompt]

    def _accepted(self, piece: Piece, prompt: list[int], result: Decoded) -> tuple[Decoded, float]:
        """Return a text that is likely and not repetitive, and the temperature it is drawn with.

        Without any, it is the likeliest that is not repetitive, with the highest temperature.
        """
        tried: list[tuple[bool, float, Decoded]] = []
        for temperature in (0.0, *_TEMPERATURES):
            if temperature:
                result = self._drawn(piece, prompt, temperature)
            log_prob = mean_log_prob(result)
            varied = compression(self._tokenizer.decode(result.tokens)) <= _MOST_COMPRESSION
            if log_prob < _LEAST_LOG_PROB and self._is_silent(piece):
                piece.fallback = "no_speech"
                return Decoded(()), temperature
            if (varied and log_prob >= _LEAST_LOG_PROB) or not self._config.fallback:
                return result, temperature
            tried.append((varied, log_prob, result))
            piece.fallback = piece.fallback or ("low_likelihood" if varied else "repetition")
        return max(tried, key=lambda item: item[:2])[2], _TEMPERATURES[-1]

    def _drawn(self, piece: Piece, prompt: list[int], temperature: float) -> Decoded:
        config = replace(
            self._config,
            beam=1,
            length_penalty=None,
            coverage_penalty=None,
            temperature=temperature,
        )
        batch, _ = self._collate([piece])
        parts = self._model, self._tokenizer, batch, [prompt], config
        return decode(*parts, None, self._boost)[0]

    def _is_silent(self, piece: Piece) -> bool:
        if self._stamps.no_speech is None:
            return False
        batch, _ = self._collate([piece])
        token = [self._stamps.no_speech]
        scores = next_token_scores(self._model, batch, self._stamps.start, token)
        return math.exp(scores.item()) > _NO_SPEECH

    def _advanced(self, piece: Piece, result: Decoded, temperature: float) -> Decoded:
        """Return what ends within the window; the next one begins behind it."""
        parts, samples = result.parts, piece.chunk.end - piece.chunk.start
        if len(parts) > 1 and parts[-1].end is None and (parts[-2].end or 0.0) > 0:
            parts = parts[:-1]
            samples = min(samples, round((parts[-1].end or 0.0) * self._rate))
        count = parts[-1].last if parts else 0
        recording = piece.recording
        recording.advance = samples
        recording.context += [token for part in parts for token in part.tokens]
        if temperature > _CONTEXT_TEMPERATURE:
            recording.context = []
        piece.chunk = replace(piece.chunk, end=piece.chunk.start + samples)
        return replace(
            result,
            tokens=result.tokens[:count],
            spans=result.spans and result.spans[:count],
            confidences=result.confidences and result.confidences[:count],
            parts=parts,
            alternatives=(),
        )


def mean_log_prob(result: Decoded) -> float:
    if not result.alternatives:
        return -math.inf
    best = result.alternatives[0]
    return best.score / (len(best.tokens) + 1)


def compression(text: str) -> float:
    """Return by how much zlib shortens a text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
