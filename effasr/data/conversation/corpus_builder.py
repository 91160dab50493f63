"""Builds the corpus of conversations from manifests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import samples_in
from effasr.data.config import DataConfig
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.conversation.epochs import epoch_mixture, of_whole_steps, token_budget
from effasr.data.conversation.messages import Conversation, conversations, num_clips
from effasr.data.conversation.rows import num_rows, num_targets
from effasr.data.conversation.shape import static_shape
from effasr.data.conversation.tokenize import training_rows
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.filters.config import FilterConfig, TooManyDropped, check_share
from effasr.data.filters.rules import Dropped, Reason, Unfit, check_duration
from effasr.data.index.columns import (
    AudioColumns,
    AudioColumnsBuilder,
    Ragged,
    RaggedBuilder,
    decode,
    encode,
    to_numpy,
)
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.tokenizer.chat import ChatTokenizer

if TYPE_CHECKING:
    from lhotse.cut import Cut


def load_conversation_corpus(
    paths: Sequence[str | Path],
    tokenizer: ChatTokenizer,
    config: DataConfig,
    *,
    stack: int,
    max_frames: int | None = None,
    max_rows: int | None = None,
    framing: Framing = FASTCONFORMER,
    sources: Sequence[int] | None = None,
) -> ConversationCorpus:
    """Read manifests, tokenize conversations and drop those that cannot be trained on.

    Args:
        paths: See `effasr.data.conversation.messages.conversations`; headers of audio files are
            read.
        tokenizer: Tokenizer with a chat template.
        config: Budgets, durations and shares.
        stack: Encoder frames of a row of speech.
        max_frames: Most encoder frames of a clip; None for no limit.
        max_rows: Most rows of a conversation; None for no limit.
        framing: Frame geometry of the encoder.
        sources: Source of each manifest, as an index into the leaves of ``config.mix``; by default
            all belong to one.

    Raises:
        ValueError: A manifest cannot be read, a setting does not suit conversations, or no
            conversation is left, of all or of one source.
        TooManyDropped: Every conversation was dropped, or more than the filters allow.
    """
    _check(config)
    sources = [0] * len(paths) if sources is None else sources
    builder = _Builder(tokenizer, config, stack, max_frames, max_rows, framing)
    for path, source in zip(paths, sources, strict=True):
        for conversation in conversations(path):
            builder.add(conversation, source)
    corpus = builder.corpus(", ".join(map(str, paths)))
    if corpus.mixture is not None:
        corpus.mixture.check(sources)
    return corpus


def _check(config: DataConfig) -> None:
    """Check that settings which are made for utterances have their defaults."""
    if config.strategy != "packed":
        raise ValueError(
            f"`data.strategy` must be packed for conversations, but is {config.strategy}."
        )
    if config.speed_perturbation != (1.0,):
        raise ValueError(
            "`data.speed_perturbation` must be [1.0] for conversations, but is "
            f"{list(config.speed_perturbation)}: leave it out."
        )
    if config.text_share is not None:
        raise ValueError(
            f"`data.text_share` must be null for conversations, but is {config.text_share:g}: give "
            "texts a share with `data.mix`; they are conversations, too."
        )
    default = FilterConfig()
    for name in [one.name for one in fields(FilterConfig)]:
        value = getattr(config.filters, name)
        if name != "max_dropped" and value != getattr(default, name):
            raise ValueError(
                f"`data.filters.{name}` must be left out for conversations, but is {value}."
            )


class _Builder:
    """Builds a `ConversationCorpus`."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        config: DataConfig,
        stack: int,
        max_frames: int | None,
        max_rows: int | None,
        framing: Framing,
    ) -> None:
        self.tokenizer, self.config, self.stack = tokenizer, config, stack
        self.max_frames, self.max_rows, self.framing = max_frames, max_rows, framing
        self.dropped: list[Dropped] = []
        self.ids, self.coded = RaggedBuilder(), RaggedBuilder("i")
        self.clips = AudioColumnsBuilder()
        self.clip_ends = array("q", [0])
        self.frames, self.rows, self.sources = array("i"), array("i"), array("H")
        self.samples = array("q")
        self.divided = 0
        self.shortest_clip = self.longest_clip = 0
        """Encoder frames; 0 before the first clip."""

    def add(self, conversation: Conversation, source: int) -> None:
        """Add a conversation, or record why it was dropped."""
        where, seconds = conversation.origin, None
        try:
            if conversation.problem is not None:
                raise conversation.problem
            cuts = []
            for clip in conversation.clips:
                where = clip.audio
                cuts.append(clip.cut(clip.id))
            where = conversation.origin
            seconds = sum(cut.duration for cut in cuts)
            examples = training_rows(conversation.messages, self.tokenizer)
        except (AudioError, Unfit) as error:
            reason = error.problem if isinstance(error, AudioError) else error.reason
            self.dropped.append(Dropped(conversation.id, reason, str(error), where, seconds))
            return
        self.divided += len(examples) > 1
        for number, (turns, coded) in enumerate(examples, 1):
            name = f"{conversation.id}-answer-{number}" if len(examples) > 1 else conversation.id
            heard = cuts[: num_clips(conversation.messages[:turns])]
            try:
                self._add(name, heard, coded, source)
            except Unfit as error:
                seconds = sum(cut.duration for cut in heard)
                self.dropped.append(Dropped(name, error.reason, str(error), where, seconds))

    def _add(self, name: str, cuts: Sequence[Cut], coded: np.ndarray, source: int) -> None:
        samples = [samples_in(cut.duration) for cut in cuts]
        frames = [self.framing.frames(count) for count in samples]
        self._check_clips([cut.duration for cut in cuts], frames)
        rows = num_rows(coded, [-(-count // self.stack) for count in frames])
        self._check_rows(coded, rows)
        for cut in cuts:
            self.clips.append(cut)
        if frames:
            self.shortest_clip = min(frames + [self.shortest_clip] * bool(self.longest_clip))
            self.longest_clip = max(self.longest_clip, *frames)
        self.clip_ends.append(len(self.clips))
        self.ids.append(encode(name))
        self.coded.append(coded.tolist())
        self.frames.append(sum(frames))
        self.samples.append(sum(samples))
        self.rows.append(rows)
        self.sources.append(source)

    def _check_clips(self, durations: Sequence[float], frames: Sequence[int]) -> None:
        config, budget = self.config, self.config.known_frame_budget
        for duration in durations:
            check_duration(duration, config.min_duration, config.max_duration)
        if sum(frames) > budget:
            details = f"{sum(frames)} encoder frames, over `frame_budget` {budget}"
            raise Unfit(Reason.FRAME_BUDGET, details)
        longest = max(frames, default=0)
        if self.max_frames is not None and longest > self.max_frames:
            raise Unfit(Reason.MODEL, f"{longest} encoder frames, over {self.max_frames}")

    def _check_rows(self, coded: np.ndarray, rows: int) -> None:
        if not num_targets(coded):
            raise Unfit(Reason.EMPTY_TEXT, "there is nothing to write")
        if (budget := self.config.token_budget) is not None and rows > budget:
            raise Unfit(Reason.TOKEN_BUDGET, f"{rows} rows of the language model, over {budget}")
        if self.max_rows is not None and rows > self.max_rows:
            raise Unfit(Reason.MODEL, f"{rows} rows of the language model, over {self.max_rows}")

    def corpus(self, shown: str) -> ConversationCorpus:
        """Return the corpus, with the token budget derived where it is left open."""
        config = self.config
        if not self.rows:
            first = f"; the first: {self.dropped[0].details}" if self.dropped else ""
            message = (
                f"{shown}: no conversation can be trained on ({len(self.dropped)} dropped{first})."
            )
            raise TooManyDropped(message, self.dropped) if self.dropped else ValueError(message)
        lengths = UtteranceLengths(to_numpy(self.frames), to_numpy(self.rows))
        budget = config.token_budget or self._suggested(lengths)
        kept = np.flatnonzero(lengths.tokens <= budget)
        ids, coded, clip_ends = self.ids.build(), self.coded.build(), to_numpy(self.clip_ends)
        for index in np.flatnonzero(lengths.tokens > budget).tolist():
            details = (
                f"{lengths.tokens[index]} rows, over {budget}, which was derived from "
                "`frame_budget`: set `token_budget` to keep it"
            )
            name, seconds = decode(ids[index]), self.samples[index] / SAMPLE_RATE
            self.dropped.append(Dropped(name, Reason.TOKEN_BUDGET, details, "", seconds))
        check_share(self.dropped, len(self.dropped) + len(kept), config.filters.max_dropped)
        samples, sources = to_numpy(self.samples), to_numpy(self.sources)
        counts = np.diff(clip_ends)
        if len(kept) < len(lengths):
            lengths = UtteranceLengths(lengths.frames[kept], lengths.tokens[kept])
            ids, coded = _taken(ids, kept), _taken(coded, kept)
            samples, sources = samples[kept], sources[kept]
        clips = self.clips.build()
        # Rows of clips that were dropped with their conversation stay, unused.
        begins, ends = clip_ends[:-1][kept], clip_ends[1:][kept]
        if len(kept) < len(counts):
            clips = _taken_clips(
                clips, np.concatenate([np.arange(*x) for x in zip(begins, ends, strict=True)])
            )
        clip_ends = np.concatenate([[0], np.cumsum(counts[kept])]).astype(np.int64)
        shape, max_clips = static_shape(
            lengths,
            config.known_frame_budget if lengths.frames.any() else 1,
            budget,
            framing=self.framing,
            shortest_clip=self.shortest_clip,
            most_clips=int(counts[kept].max()),
            max_sequences=config.max_sequences,
        )
        digest = hashlib.sha256()
        for values in (lengths.frames, lengths.tokens, coded.values, coded.offsets, sources):
            digest.update(np.ascontiguousarray(values).data)
        amounts, mixture = lengths.tokens, None
        if config.mix is not None:
            mixture = epoch_mixture(config.mix, lengths, sources)
            mixture = of_whole_steps(mixture, lengths, sources, shape, config.micro_batches)
        return ConversationCorpus(
            lengths=lengths,
            shape=shape,
            dropped=tuple(self.dropped),
            seconds=float(samples.sum()) / SAMPLE_RATE,
            amounts=amounts,
            samples=samples,
            sources=sources,
            mixture=mixture,
            fingerprint=digest.hexdigest(),
            stack=self.stack,
            max_clips=max_clips,
            shortest_clip=self.shortest_clip,
            longest_clip=self.longest_clip,
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            ids=ids,
            coded=coded,
            audio_columns=clips,
            clip_ends=clip_ends,
            divided=self.divided,
        )

    def _suggested(self, lengths: UtteranceLengths) -> int:
        """Return the token budget that an epoch fills along with the frame budget."""
        config = self.config
        if not lengths.frames.any():
            raise ValueError(
                "`data.token_budget` must be given for conversations without speech, but is null: "
                "set it to the rows of the language model in a micro-batch."
            )
        mixture, sources = None, to_numpy(self.sources)
        if config.mix is not None:
            mixture = epoch_mixture(config.mix, lengths, sources)
        return token_budget(lengths, sources, mixture, config.known_frame_budget)


def _taken(ragged: Ragged, kept: np.ndarray) -> Ragged:
    lengths = ragged.lengths[kept]
    parts = [np.zeros(0, ragged.values.dtype), *(ragged[index] for index in kept.tolist())]
    return Ragged(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]))


def _taken_clips(clips: AudioColumns, kept: np.ndarray) -> AudioColumns:
    kept = kept.astype(np.int64)
    values: dict[str, Any] = {one.name: getattr(clips, one.name) for one in fields(AudioColumns)}
    for name, value in values.items():
        values[name] = _taken(value, kept) if isinstance(value, Ragged) else value[kept]
    return AudioColumns(**values)
