"""Pipeline from recordings to transcripts: load, split, batch, decode, join."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import islice
from operator import itemgetter

import numpy as np
import torch

from effasr.data.audio.loudness import is_speech, loudness
from effasr.data.audio.waveform import is_plausible
from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.conversation.batch import asking, collate_conversations
from effasr.data.languages import AUTO
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.tokenizer import ChatTokenizer, Tokenizer, WhisperTokenizer
from effasr.decoding.checks import check_config, check_prompt, choose_attention
from effasr.decoding.confidence.calibration import load_calibration
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode, next_token_scores
from effasr.decoding.decoded import Decoded
from effasr.decoding.lm.loading import load_boost, load_lm
from effasr.decoding.timestamps import timestamp_rules
from effasr.model.asr import ASRModel
from effasr.model.encoder import FastConformerConfig
from effasr.nn.lora import LanguageAdapters
from effasr.nn.parameters import evaluating
from effasr.transcription.batching import plan_batches
from effasr.transcription.cpu_weights import OneDNNWeights, rounds_to_bfloat16
from effasr.transcription.decode_queue import (
    BatchDecoder,
    ContinuousBatches,
    ConversationBatches,
    SequentialBatches,
    SingleBatches,
    windows,
)
from effasr.transcription.inputs.arrival import Interruption
from effasr.transcription.inputs.audio_stream import AudioStream
from effasr.transcription.inputs.chunking import Chunk, cut_at_pauses, speech_chunks, trimmed
from effasr.transcription.inputs.prefetch import prefetch
from effasr.transcription.inputs.vad import Detector, Detectors
from effasr.transcription.online import OnlineStream, online_recognizer
from effasr.transcription.recordings import (
    FIRST_CHUNKS,
    OpenRecording,
    Piece,
    Request,
    take_finished,
    take_interrupted,
)
from effasr.transcription.results import (
    Alternative,
    Fallback,
    Result,
    Segment,
    WordConfidence,
    confidence,
    word_confidences,
)
from effasr.transcription.second_pass.rescore import load_second_pass
from effasr.transcription.word_timestamps import Word, split_text, word_timestamps, words_of_parts

_WINDOW_BATCHES = 2  # batches of audio that are loaded before batches are planned by length

_PHRASE_SECONDS = 5.0  # typical utterances that are longer have pauses in them
_CHUNK_SECONDS = 30.0  # longest chunk by default

_FALLBACK_NGRAM = 4
_FALLBACK_TEMPERATURES = 0.2, 0.4, 0.6, 0.8, 1.0  # as Whisper's

_NO_AUDIO = np.zeros(0, np.float32)

_log = logging.getLogger(__name__)


class Recognizer:
    """Transcribes recordings of any length, on the device of the model."""

    def __init__(self, model: ASRModel, tokenizer: Tokenizer, config: DecodingConfig | None = None):
        self.model, self.tokenizer = model, tokenizer
        config = DecodingConfig() if config is None else config
        self._features = model.config.features
        self.sample_rate = self._features.sample_rate  # of the audio that requests load
        rows, encoder = self._features.rows_per_frame, model.config.encoder
        per_frame = config.tokens_per_frame
        if isinstance(encoder, FastConformerConfig):
            per_frame *= rows / 8
        elif getattr(encoder, "family", None) == "moonshine":
            # 13 tokens a second by default, as its authors limit generation.
            per_frame *= 6.5 * self._features.framing.seconds
        device = next(model.parameters()).device
        # What reads samples needs as much memory for a frame of 20 ms as others for 80 ms.
        self._budget = config.budget_on(device) * 8 // (8 if rows == 1 else rows)
        self.config = replace(config, frame_budget=self._budget, tokens_per_frame=per_frame)
        self._frame_samples = self._features.framing.samples
        self._detectors = Detectors(config.vad, self.sample_rate)
        self.vad = self._detectors.name
        self.method = check_config(model, self.config)
        choose_attention(model, self.config)
        stamps = timestamp_rules(model, tokenizer).tokens if self.config.has_times else None
        self._times_words = stamps is not None and stamps.marker is not None
        # The confidence decides with `no_speech` and `fallback_confidence`, too.
        limits = self.config.no_speech, self.config.fallback_confidence
        judged = self.config.confidence or limits != (None, None)
        self._search = replace(self.config, confidence=judged)
        self._lm = load_lm(self.config, model, tokenizer)
        self._boost = load_boost(self.config, model, tokenizer)
        self._calibration = load_calibration(self.config.calibration, self.method)
        self._second = load_second_pass(self.config, device)
        self._cpu_weights: OneDNNWeights | None = None

    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the tokens that the decoder reads first, or the rows of a conversation.

        Those of `AUTO` are for the first of the languages that may be heard.
        """
        if languages := self.model.config.language_adapters:
            adapters = LanguageAdapters(languages)
            if adapters.number_of(prompt) == len(languages):
                _warn_without_adapter(prompt.source, languages)
        if self._is_to_be_heard(prompt):
            # All are checked: each may be heard, and be the language that is written, or another.
            first, *_ = [self.prompt(prompt.stating(x)) for x in self._possible_languages()]
            return first
        if (experts := self.model.config.numbering()) is not None:
            experts.number_of(prompt)
        check_prompt(prompt, self.method, self.config)
        if self.method == "language_model":
            # The rows of a conversation whose user speaks and gives an instruction.
            # Imported here, because they import lhotse, which takes a third of a second.
            from effasr.data.conversation.messages import AudioPart, Message
            from effasr.data.conversation.tokenize import prompt_rows

            tokenizer = self.tokenizer
            if not isinstance(tokenizer, ChatTokenizer):
                raise ValueError(
                    "`tokenizer` must have a chat template for a language model, but is a "
                    f"{type(tokenizer).__name__}."
                )
            turn = Message("user", (AudioPart(""), self.config.instruction))
            return prompt_rows([turn], tokenizer).tolist()
        return self.tokenizer.prompt(prompt)

    def _is_to_be_heard(self, prompt: Prompt) -> bool:
        """Whether the language is not named, and the model has no prompt for that."""
        prompts = self.model.config.language_prompt
        return prompt.source == AUTO and (prompts is None or AUTO not in prompts.languages)

    def _possible_languages(self) -> tuple[str, ...]:
        sources = self.tokenizer.sources
        if not sources or (len(sources) > 1 and self.method != "attention"):
            raise ValueError(
                f"`language` must be named for the method {self.method} of this model, which has "
                "no prompts to compare, but is auto: name the language that is spoken."
            )
        return sources

    def _hear_languages(self, pieces: Sequence[Piece]) -> None:
        """Find the language of recordings that ask for it, by their first chunks."""
        first: dict[int, Piece] = {}
        for piece in pieces:
            if self._is_to_be_heard(piece.recording.request.prompt):
                first.setdefault(id(piece.recording), piece)
        waiting = list(first.values())
        frames = [piece.frames for piece in waiting]
        for indices in plan_batches(frames, self._budget, self.config.max_sequences):
            chosen = [waiting[index] for index in indices]
            with evaluating(self.model), self._computing():
                languages = self._languages_of(chosen)
            for piece, language in zip(chosen, languages, strict=True):
                piece.recording.language = language
                self._request(piece.recording, language)

    def _languages_of(self, pieces: list[Piece]) -> Sequence[str]:
        possible = self._possible_languages()
        if len(possible) == 1:
            return possible * len(pieces)
        if isinstance(self.tokenizer, WhisperTokenizer):
            start, tokens = self.tokenizer.language_tokens()
            scores = next_token_scores(self.model, self._collated(pieces)[0], start, tokens)
            return [possible[index] for index in scores.argmax(dim=1).tolist()]
        # The likelihood of what is written in each language.
        requests = [piece.recording.request for piece in pieces]
        per_frame = self.config.tokens_per_frame
        config = DecodingConfig(tokens_per_frame=per_frame, confidence=True)
        best = [(-math.inf, possible[0])] * len(pieces)
        for language in possible:
            for piece in pieces:
                self._request(piece.recording, language)
            batch, prompts = self._collated(pieces)
            texts = decode(self.model, self.tokenizer, batch, prompts, config)
            for index, text in enumerate(texts):
                likelihood = -math.inf
                if text.tokens and text.score is not None:
                    likelihood = text.score.log_prob / text.score.symbols
                best[index] = max(best[index], (likelihood, language), key=itemgetter(0))
            for piece, request in zip(pieces, requests, strict=True):
                piece.recording.request = request
        return [language for _, language in best]

    def _request(self, recording: OpenRecording, language: str) -> None:
        prompt = recording.request.prompt.stating(language)
        recording.request = replace(recording.request, prompt=prompt)
        recording.prompt = self.prompt(prompt)

    def stream(self, latency_seconds: float | None = None) -> OnlineStream:
        """Begin to transcribe arriving audio; `OnlineRecognizer` serves many streams at a time."""
        return online_recognizer(
            self.model, self.tokenizer, self.config, latency_seconds=latency_seconds
        ).open()

    def results(
        self,
        requests: Iterable[Request],
        on_audio: Callable[[float], None] | None = None,
        interruption: Interruption | None = None,
    ) -> Iterator[Result]:
        """Transcribe recordings, in order, with a bounded amount of audio in memory.

        With a second language model, results come some recordings later.

        Streams are read, decoded and dropped chunk by chunk. The model is in evaluation mode while
        it decodes, and in its former mode when a result is yielded. A recording that cannot be
        loaded, whose prompt is refused, or of which a single chunk exceeds the GPU's memory gives a
        `Failure`; the others go on. An interruption ends the results with what is decoded.
        """
        results = self._results(requests, on_audio, interruption or Interruption())
        return results if self._second is None else self._second.results(results)

    @property
    def frame_seconds(self) -> float:
        return self._frame_samples / self.sample_rate

    def ctc_scores(self, request: Request) -> Iterator[tuple[Chunk, np.ndarray, torch.Tensor]]:
        """Yield the chunks of a recording, in order, with their samples and scores of CTC.

        Scores are log-probabilities less the highest of each frame, float32 (T, V + 1) on the CPU.
        A recording that cannot be read raises ValueError.
        """
        self._cpu_weights = OneDNNWeights(self.model, torch.float32)
        recording = OpenRecording(request, self.sample_rate, self.vad)
        for piece in self._pieces(recording):
            with torch.no_grad(), evaluating(self.model), self._computing():
                encoded = self.model.encode(self._collated([piece])[0])
                scores = self.model.ctc_logits(encoded.unpack()[0]).float().log_softmax(-1)
                scores = (scores - scores.amax(1, keepdim=True)).cpu()
            yield piece.chunk, piece.audio, scores
        if recording.failure is not None or recording.partial is not None:
            raise ValueError(recording.failure or recording.partial)

    def _results(
        self,
        requests: Iterable[Request],
        on_audio: Callable[[float], None] | None,
        interruption: Interruption,
    ) -> Iterator[Result]:
        # Streamed speech comes in many calls, each too short to justify packing all weights.
        if self._cpu_weights is None or not self._cpu_weights.is_current:
            dtype = torch.bfloat16 if self._rounds_weights else torch.float32
            self._cpu_weights = OneDNNWeights(self.model, dtype)
        if self._is_sequential:
            yield from self._sequential_results(requests, on_audio, interruption)
            return
        decoder = self._batch_decoder()
        enough = _WINDOW_BATCHES * self._budget
        window: list[Piece] = []
        frames = 0
        unfinished: deque[OpenRecording] = deque()
        for recording in prefetch(self._begin, requests, workers=self.config.workers):
            unfinished.append(recording)
            for piece in recording.arriving():
                window.append(piece)
                frames += piece.frames
                if frames >= enough:
                    self._decode_window(decoder, window, on_audio)
                    window, frames = [], 0
                    yield from take_finished(unfinished)
                if interruption.requested:
                    break
            yield from take_finished(unfinished)
            if interruption.requested:
                yield from take_interrupted(unfinished)
                return
        self._decode_window(decoder, window, on_audio)
        self._decode_batch(decoder, [], on_audio)
        yield from take_finished(unfinished)

    def _sequential_results(
        self,
        requests: Iterable[Request],
        on_audio: Callable[[float], None] | None,
        interruption: Interruption,
    ) -> Iterator[Result]:
        """Decode a window of each of some recordings at a time."""
        decoder = SequentialBatches(
            self.model,
            self.tokenizer,
            self._search,
            self._boost,
            self._collated,
            self.sample_rate,
        )
        longest = self._features.encoder_frames(int(self._longest_chunk() * self.sample_rate))
        most = max(1, min(self.config.max_sequences, self._budget // longest))
        opened = prefetch(self._begin, requests, workers=self.config.workers)
        unfinished: deque[OpenRecording] = deque()
        pieces: list[Piece] = []
        while not interruption.requested:
            for recording in islice(opened, most - len(pieces)):
                unfinished.append(recording)
                recording.pieces, recording.read = recording.first, not recording.first
                pieces += recording.first
            if not pieces:
                break
            self._decode_window(decoder, pieces, on_audio)
            following = []
            for recording in [piece.recording for piece in pieces]:
                piece = next(recording.coming, None) if recording.failure is None else None
                recording.read = piece is None
                following += [] if piece is None else [piece]
            for piece in following:
                piece.recording.pieces.append(piece)
            pieces = following
            yield from take_finished(unfinished)
        yield from take_finished(unfinished)
        yield from take_interrupted(unfinished)

    @property
    def _is_sequential(self) -> bool:
        return self.config.long_form == "sequential"

    def _begin(self, request: Request) -> OpenRecording:
        """Open a recording and read its first chunks, which are all that most have."""
        recording = OpenRecording(request, self.sample_rate, self.vad)
        recording.coming = self._pieces(recording)
        count = 1 if self._is_sequential else FIRST_CHUNKS
        recording.first = list(islice(recording.coming, count))
        return recording

    def _pieces(self, recording: OpenRecording) -> Iterator[Piece]:
        # An error in one file must not end the transcription of the others.
        detector = self._detectors.take()
        try:
            recording.prompt = self.prompt(recording.request.prompt)
            audio = recording.request.load()
            if isinstance(audio, AudioStream):
                blocks, total = audio.blocks, audio.total
            else:
                _check(audio)
                blocks, total = [audio], len(audio)
            measured = recording.measuring(blocks)
            for chunk, samples in self._chunks(recording, measured, total, detector):
                missing = max(0, self._frame_samples - len(samples))
                samples = np.pad(samples, (0, missing)) if missing else samples
                yield Piece(recording, chunk, samples, self._features.encoder_frames(len(samples)))
            if isinstance(audio, AudioStream):
                recording.partial, recording.warning = audio.partial, audio.warning
        except Exception as error:
            # Error messages of effasr are sentences; other errors are shown with their type.
            ours = isinstance(error, ValueError)
            recording.failure = str(error) if ours else f"{type(error).__name__}: {error}"
        finally:
            self._detectors.give_back(detector)

    def _chunks(
        self,
        recording: OpenRecording,
        blocks: Iterable[np.ndarray],
        total: int | None,
        detector: Detector,
    ) -> Iterator[tuple[Chunk, np.ndarray]]:
        rate, longest, gap = self.sample_rate, self._longest_chunk(), self.config.gap_seconds
        if self._is_sequential:
            return windows(blocks, rate, detector, longest, gap, lambda: recording.advance)
        search = min(self.config.search_seconds, longest / 2)
        trained = self.model.durations if self.config.chunk_seconds is None else None
        packed = longest if trained is None else min(longest, trained.typical)
        # Utterances that short are single phrases: a model that is trained on them knows no pause.
        packed = 0.0 if packed < _PHRASE_SECONDS else packed
        limits = {"chunk_seconds": longest, "search_seconds": search}
        if gap is None:
            return trimmed(cut_at_pauses(blocks, rate, total=total, **limits), rate, detector)
        return speech_chunks(blocks, rate, detector, gap, packed, **limits)

    def _longest_chunk(self) -> float:
        longest, most = self.config.chunk_seconds, self.model.config.encoder.max_frames
        if longest is None:
            trained = self.model.durations
            longest = _CHUNK_SECONDS
            if trained is not None:
                longest = min(longest, max(1.0, trained.longest))
        if most is not None:
            longest = min(longest, most * self._frame_samples / self.sample_rate)
        return longest

    def _batch_decoder(self) -> BatchDecoder:
        if self.method == "language_model" and isinstance(self.tokenizer, ChatTokenizer):
            return ConversationBatches(self.model, self.tokenizer, self.config)
        if self.method != "attention" or not self.config.is_plain_greedy:
            parts = self.model, self.tokenizer, self._search
            return SingleBatches(*parts, self._lm, self._boost)
        most = self._features.encoder_frames(int(self._longest_chunk() * self.sample_rate) + 1)
        return ContinuousBatches(self.model, self.tokenizer, self._search, most)

    def _decode_window(
        self, decoder: BatchDecoder, pieces: list[Piece], on_audio: Callable[[float], None] | None
    ) -> None:
        """Submit the pieces in batches; the decoder may finish them later."""
        self._hear_languages(pieces)
        plan = plan_batches(
            [piece.frames for piece in pieces], self._budget, self.config.max_sequences
        )
        for indices in plan:
            self._decode_batch(decoder, [pieces[index] for index in indices], on_audio)

    def _decode_batch(
        self, decoder: BatchDecoder, pieces: list[Piece], on_audio: Callable[[float], None] | None
    ) -> None:
        """Decode a batch, or without pieces what the decoder still holds."""
        with evaluating(self.model):
            done = self._decode(decoder, pieces)
        if on_audio is not None and done:
            on_audio(done)

    def _decode(self, decoder: BatchDecoder, pieces: list[Piece]) -> float:
        """Decode a batch, or what is left; in batches of half the size if memory runs out."""
        done, enough = self._take(decoder, pieces)
        if enough:
            return done
        # This is outside of `except`, where the traceback would keep the failed batch's tensors
        # alive.
        waiting = decoder.abandon()
        abandoned = {id(piece) for piece in waiting}
        waiting += [p for p in pieces if not p.decoded and id(p) not in abandoned]
        if len(waiting) > 1:
            middle = len(waiting) // 2
            for half in (waiting[:middle], waiting[middle:]):
                done += self._decode(decoder, half) + self._decode(decoder, [])
        for piece in waiting if len(waiting) == 1 else ():
            piece.recording.failure = (
                f"out of memory with one chunk of {piece.frames} frames: lower `chunk_seconds`"
            )
            done += self._done(piece)
        return done

    def _take(self, decoder: BatchDecoder, pieces: list[Piece]) -> tuple[float, bool]:
        """Decode pieces; returns their seconds, and whether the memory was sufficient."""
        done = 0.0
        try:
            with self._computing():
                fed = decoder.feed(*self._collated(pieces), pieces) if pieces else decoder.finish()
                for piece, result in self._decoded_again(fed):
                    piece.text = self._text(result.tokens)
                    piece.truncated, piece.score = result.truncated, result.score
                    piece.alternatives = tuple(
                        Alternative(
                            self._text(text.tokens), text.score, text.rank, None, text.parts
                        )
                        for text in result.alternatives
                    )
                    piece.words = self._words(piece, result)
                    piece.word_confidences = self._word_confidences(piece, result)
                    self._judge(piece)
                    piece.segments = self._divided(piece, result)
                    done += self._done(piece)
        except torch.OutOfMemoryError:
            return done, False
        return done, True

    @contextmanager
    def _computing(self) -> Iterator[None]:
        kind, half = next(self.model.parameters()).device.type, self.config.precision == "bfloat16"
        half = half and not self._rounds_weights
        assert self._cpu_weights is not None
        with torch.autocast(kind, torch.bfloat16, enabled=half), self._cpu_weights.active():
            yield

    @property
    def _rounds_weights(self) -> bool:
        """Whether the weights for a CPU round, which is several times as fast as autocast."""
        is_cpu = next(self.model.parameters()).device.type == "cpu"
        return is_cpu and self.config.precision == "bfloat16" and rounds_to_bfloat16()

    def _decoded_again(
        self, results: Iterable[tuple[Piece, Decoded]]
    ) -> Iterator[tuple[Piece, Decoded]]:
        """Yield results; of what the attention decoder repeats or doubts, those of other searches.

        A text in doubt is replaced by one that is not.
        """
        least = self.config.fallback_confidence
        for piece, result in results:
            reason: Fallback | None = None
            if result.truncated or repeats(result.tokens):
                reason = "repetition"
            elif least is not None and _is_doubted(result, least):
                reason = "low_likelihood"
            for config in () if reason is None else self._fallbacks(piece, reason):
                batch, prompts = self._collated([piece])
                readers = self._lm, self._boost
                # Nobody would decode the piece again: its batch is done.
                with suppress(torch.OutOfMemoryError):
                    (other,) = decode(self.model, self.tokenizer, batch, prompts, config, *readers)
                    is_better = not (other.truncated or repeats(other.tokens))
                    is_better &= least is None or not _is_doubted(other, least)
                    if is_better or reason == "repetition":
                        result, piece.fallback = other, reason
                        break
            yield piece, result

    def _fallbacks(self, piece: Piece, reason: Fallback) -> Iterator[DecodingConfig]:
        config = self._search
        if self.method != "attention" or not config.fallback or self._is_sequential:
            return
        plain = replace(
            DecodingConfig(tokens_per_frame=config.tokens_per_frame),
            extra_tokens=config.extra_tokens,
            nbest=None if config.nbest is None else 1,
            words=config.words,
            confidence=config.confidence,
            word_confidence=config.word_confidence,
        )
        if self.model.config.ctc and piece.recording.request.prompt.monotonic:
            yield replace(plain, method="ctc")
        elif reason == "low_likelihood":
            fused = {"lm": config.lm, "lm_unit": config.lm_unit, "lm_weight": config.lm_weight}
            heated = replace(plain, method="attention", timestamps=config.timestamps, **fused)
            for heat in _FALLBACK_TEMPERATURES:
                yield replace(heated, temperature=heat)
        elif config.no_repeat_ngram is None:
            yield replace(config, no_repeat_ngram=_FALLBACK_NGRAM)

    def _judge(self, piece: Piece) -> None:
        """Drop the text of what is probably no speech, and the score if it was not requested."""
        least, sure = self.config.no_speech, confidence([piece.score])
        if least is not None and piece.chunk.speech < least and (sure or 0.0) < least:
            piece.text, piece.truncated, piece.alternatives = "", False, ()
            piece.words = piece.word_confidences = ()
            piece.fallback = "no_speech"
        if not self.config.confidence:
            piece.score = None

    def _divided(self, piece: Piece, result: Decoded) -> tuple[Segment, ...]:
        """Return the segments of a text that has timestamps; none without any text."""
        rate, request = self.sample_rate, piece.recording.request
        begin, until = piece.chunk.start / rate, piece.chunk.end / rate
        spaces, count = request.prompt.target not in WITHOUT_SPACES, 0
        segments: list[Segment] = []
        for part in result.parts if piece.text and not self._times_words else ():
            text = self._text(result.tokens[part.first : part.last])
            first, count = count, count + len(split_text(text, spaces))
            if not text:
                continue
            words = piece.words and piece.words[first:count]
            confidences = piece.word_confidences and piece.word_confidences[first:count]
            start = min(begin + part.start, until)
            end = until if part.end is None else min(begin + part.end, until)
            if words:
                start, end = words[0].start, words[-1].end
            score = piece.score and piece.score.of_tokens(part.last - part.first)
            truncated = piece.truncated and part.end is None
            segment = Segment(start, end, text, truncated, words, score)
            segment = replace(
                segment,
                word_confidences=confidences,
                channel=request.channel,
                fallback=piece.fallback,
            )
            segments.append(segment)
        return tuple(segments)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens)).strip()

    def _done(self, piece: Piece) -> float:
        """Drop the audio of a piece, and return its seconds."""
        piece.audio, piece.decoded = _NO_AUDIO, True
        return (piece.chunk.end - piece.chunk.start) / self.sample_rate

    def _words(self, piece: Piece, result: Decoded) -> tuple[Word, ...] | None:
        if not piece.recording.request.prompt.monotonic:
            return ()
        offset, until = piece.chunk.start / self.sample_rate, piece.chunk.end / self.sample_rate
        spaces = piece.recording.request.prompt.target not in WITHOUT_SPACES
        if self._times_words and result.parts:
            parts = [
                (split_text(self._text(result.tokens[x.first : x.last]), spaces), x.start, x.end)
                for x in result.parts
            ]
            return tuple(words_of_parts(parts, offset, until))
        if result.spans is None:
            return None if self.config.wants_words else ()
        # The number of frames is rounded up, so the last frame may extend beyond the audio.
        words = word_timestamps(
            result.tokens,
            result.spans,
            self.tokenizer.decode,
            frame_seconds=self._frame_samples / self.sample_rate,
            speech=is_speech(loudness(piece.audio, self.sample_rate)),
            offset=offset,
            until=until,
            spaces=spaces,
            cuts=[part.first for part in result.parts],
        )
        return tuple(words)

    def _word_confidences(self, piece: Piece, result: Decoded) -> tuple[WordConfidence, ...] | None:
        if result.confidences is None:
            return None if self.config.word_confidence else ()
        return word_confidences(
            result.tokens,
            result.confidences,
            self.tokenizer.decode,
            spaces=piece.recording.request.prompt.target not in WITHOUT_SPACES,
            calibration=self._calibration,
            cuts=[part.first for part in result.parts],
        )

    def _collated(self, pieces: list[Piece]) -> tuple[Batch, list[list[int]]]:
        device = next(self.model.parameters()).device
        prompts = [piece.recording.prompt for piece in pieces]
        settings = self.model.config.language_model
        if settings is not None:
            conversations = [
                asking(piece.recording.request.id, piece.recording.prompt, (piece.audio,))
                for piece in pieces
            ]
            packed = collate_conversations(
                conversations,
                stack=settings.stack,
                pad_id=self.tokenizer.pad_id,
                framing=self._features.framing,
            )
            return packed.to(device), prompts
        experts = self.model.config.numbering()
        requests = [piece.recording.request for piece in pieces]
        examples = [
            Example(
                id=request.id,
                audio=piece.audio,
                prompt=piece.recording.prompt,
                text=[],
                monotonic=False,
                expert=None if experts is None else experts.number_of(request.prompt),
            )
            for request, piece in zip(requests, pieces, strict=True)
        ]
        batch = collate(
            examples,
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            framing=self._features.framing,
        )
        return batch.to(device), prompts


@cache
def _warn_without_adapter(language: str, adapted: tuple[str, ...]) -> None:
    _log.warning(
        "speech in %r uses the weights without an adapter: those of lora.by_language are of %s.",
        *(language, ", ".join(adapted)),
    )


def _is_doubted(result: Decoded, least: float) -> bool:
    sure = confidence([result.score])
    return sure is not None and sure < least


def repeats(tokens: Sequence[int], times: int = 8, longest: int = 8) -> bool:
    """Return whether a sequence of at most ``longest`` tokens comes so many times in a row."""
    for length in range(1, longest + 1):
        run = 0
        for now, before in zip(tokens[length:], tokens, strict=False):
            run = run + 1 if now == before else 0
            if run >= length * (times - 1):
                return True
    return False


def _check(audio: np.ndarray) -> None:
    if audio.ndim != 1 or not len(audio):
        raise ValueError(f"the audio must be mono and not empty, but has shape {audio.shape}")
    if not is_plausible(audio):
        raise ValueError("the audio must be finite, but has NaN or infinite samples, or nearly so")
