"""All conversations of a run, in arrays that worker processes share."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
from lhotse.cut import Cut

from effasr.checks import check
from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import AudioSegment, load_audio, samples_in
from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.conversation.batch import (
    ConversationBatch,
    ConversationExample,
    collate_conversations,
)
from effasr.data.conversation.messages import Conversation, conversations, num_clips
from effasr.data.conversation.rows import num_rows, num_targets
from effasr.data.conversation.tokenize import training_rows
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.filters.config import FilterConfig, check_share
from effasr.data.filters.rules import (
    DURATION_RULES,
    FRAME_RULES,
    Dropped,
    Lengths,
    Reason,
    RejectedUtterance,
    require,
)
from effasr.data.index.base_corpus import BaseCorpus, digest, nothing_left
from effasr.data.index.columns import (
    AudioColumns,
    AudioColumnsBuilder,
    Ragged,
    RaggedBuilder,
    decode,
    encode,
    to_numpy,
)
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import suggest_token_budget, with_sequences
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population, even_population, mean_epoch
from effasr.data.tokenizer.chat import ChatTokenizer

# Shapes of batches of conversations, and epochs of mixed ones that fill whole steps.


_SHORTEST = 8  # rows of a very short conversation, for the number of sequences of a batch


def static_shape(
    lengths: UtteranceLengths,
    frame_budget: int,
    token_budget: int,
    *,
    framing: Framing,
    shortest_clip: int,
    most_clips: int,
    max_sequences: int | Literal["auto"] | None = None,
    usual: UtteranceLengths | None = None,
) -> tuple[StaticShape, int]:
    """Return the static shape of batches of these conversations, and the most clips of a batch.

    ``lengths`` and budgets are encoder frames and rows of the language model, ``shortest_clip`` is
    in encoder frames, ``most_clips`` of a conversation; ``usual`` are the lengths of an epoch, by
    default these.
    """
    shortest = max(_SHORTEST, int(lengths.tokens.min()))
    shape = StaticShape(
        frame_budget,
        token_budget,
        max(framing.sequences(frame_budget), -(-token_budget // shortest)),
        longest_frames=max(1, int(lengths.frames.max())),
        longest_tokens=max(1, int(lengths.tokens.max())),
        framing=framing,
    )
    shape = with_sequences(shape, max_sequences, lengths if usual is None else usual)
    by_frames = frame_budget // max(1, shortest_clip)
    return shape, max(1, min(by_frames, shape.max_sequences * most_clips))


def split_into_clips(frames: int, longest: int, stack: int) -> Sequence[int]:
    """Divide the speech of a conversation into few clips, none longer than ``longest`` frames.

    All but the last fill their rows of the language model (``stack`` frames each), so that together
    they have as many as one clip of all frames.
    """
    if frames <= longest:
        return [frames] if frames else []
    rows = -(-frames // stack)
    count = -(-rows // max(1, longest // stack))
    clips = [stack * (rows // count + (number < rows % count)) for number in range(count)]
    clips[-1] -= rows * stack - frames
    return clips


_FILL = 0.9975  # share of the budgets that an epoch is to fill; the planner reaches it


def epoch_mixture(mix: MixConfig, lengths: UtteranceLengths, sources: np.ndarray) -> Mixture:
    """Divide an epoch among sources by rows of the language model, which all conversations have."""
    return Mixture.of(mix, sources, lengths.tokens, unit="tokens", draws_tokens=True)


def populations(
    mixture: Mixture | None, lengths: UtteranceLengths, sources: np.ndarray, *, seed: int
) -> Population | None:
    """Return a function from the epoch to its conversations; None where each has every one once.

    All epochs have the same frames and rows.
    """
    if mixture is None or (quotas := mixture.quotas) is None:
        return None
    return lambda epoch: even_population(lengths, sources, quotas, seed=seed, epoch=epoch)


def epoch_lengths(
    lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture | None
) -> tuple[UtteranceLengths, tuple[int, int] | None]:
    """Return the lengths of an epoch, and its frames and rows on average.

    `effasr.data.sampling.packing.suggest_token_budget` takes both; the second is None where it is
    the sums of the first.
    """
    draw = populations(mixture, lengths, sources, seed=0)
    if mixture is None or mixture.quotas is None or draw is None:
        return lengths, None
    return lengths.take(draw(0)), mean_epoch(lengths, sources, mixture.quotas)


def token_budget(
    lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture | None, frame_budget: int
) -> int:
    """Return the token budget that epochs fill along with the frame budget."""
    drawn, sums = epoch_lengths(lengths, sources, mixture)
    return suggest_token_budget(drawn, frame_budget, sums)


def of_whole_steps(
    mixture: Mixture,
    lengths: UtteranceLengths,
    sources: np.ndarray,
    shape: StaticShape,
    micro_batches: int,
) -> Mixture:
    """Return a mixture whose epochs fill a whole number of steps, the nearest to its own.

    An epoch of drawn conversations has no natural length, and the room in its last step is lost.
    """
    if mixture.quotas is None:
        return mixture
    frames, rows = mean_epoch(lengths, sources, mixture.quotas)
    fill = max(frames / shape.frame_budget, rows / shape.token_budget) / micro_batches
    scale = max(1, round(fill)) * _FILL / fill
    return replace(mixture, quotas=tuple(round(quota * scale) for quota in mixture.quotas))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConversationCorpus(BaseCorpus):
    """Conversations that can be trained on; see `load_conversation_corpus`.

    Lengths and shape are of the frames of all clips, and of rows of the language model.
    """

    stack: int  # encoder frames of a row of speech
    max_clips: int  # of a batch
    shortest_clip: int  # encoder frames; 0 without speech
    longest_clip: int  # encoder frames; 0 without speech
    ids: Ragged
    coded: Ragged  # see `effasr.data.conversation.rows`
    audio_columns: AudioColumns  # of all clips
    clip_ends: np.ndarray  # int64 (n + 1,); conversation i has clips from clip_ends[i] on
    divided: int = 0  # conversations that have an example for each answer; see `training_rows`

    @property
    def amounts(self) -> np.ndarray:
        """Rows of each conversation, by which shares are measured."""
        return self.lengths.tokens

    def populations(self, seed: int) -> Population | None:
        return populations(self.mixture, self.lengths, self.sources, seed=seed)

    @property
    def text_lengths(self) -> np.ndarray:
        """Rows of each conversation without its speech, int32 (n,)."""
        return self.lengths.tokens - -(-self.lengths.frames // self.stack)

    @property
    def clip_counts(self) -> np.ndarray:
        return np.diff(self.clip_ends)

    def token_ids(self, vocab_size: int) -> np.ndarray:
        values = self.coded.values
        ids = np.where(values < 0, ~values, values)
        return np.unique(ids[(ids >= 0) & (ids < vocab_size)])

    def clips(self, index: int) -> list[AudioSegment]:
        segments = [self.audio_columns[row] for row in range(*self.clip_ends[index : index + 2])]
        return cast("list[AudioSegment]", segments)

    def audio(self, index: int) -> AudioSegment:
        """Return the first clip of a conversation, for messages; of no file without any."""
        clips = self.clips(index)
        return clips[0] if clips else AudioSegment("", 0.0, 0.0, (0,))

    def name(self, index: int) -> str:
        return decode(self.ids[index])

    def rows(self, index: int) -> np.ndarray:
        """Return the coded rows of a conversation; see `effasr.data.conversation.rows`."""
        return self.coded[index]

    def example(self, index: int) -> ConversationExample:
        """Return the conversation with its speech, ready to be packed."""
        name = self.name(index)
        try:
            clips = tuple(load_audio(clip) for clip in self.clips(index))
        except AudioError as error:
            raise AudioError(error.problem, f"conversation {name!r}: {error}") from error
        return ConversationExample(name, self.coded[index], clips)

    def collate(
        self,
        examples: Sequence[ConversationExample],
        shape: StaticShape | None,
        *,
        padded: bool = False,
    ) -> ConversationBatch:
        check(not padded, "padded", "be false for conversations", "true", "leave it out")
        return collate_conversations(
            examples,
            shape,
            stack=self.stack,
            pad_id=self.pad_id,
            max_clips=self.max_clips,
            framing=self.shape.framing,
        )


# Builds the corpus of conversations from manifests.


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

    Headers of audio files are read. ``stack`` is the encoder frames of a row of speech,
    ``max_frames`` those of a clip, ``max_rows`` the rows of a conversation.
    """
    _check(config)
    sources = [0] * len(paths) if sources is None else sources
    builder = _Builder(tokenizer, config, stack, max_frames, max_rows, framing)
    for path, source in zip(paths, sources, strict=True):
        for conversation in conversations(path):
            builder.add(conversation, source)
    if not builder.rows:
        raise nothing_left(paths, "no conversation can be trained on", builder.dropped)
    corpus = builder.corpus()
    if corpus.mixture is not None:
        corpus.mixture.check(sources)
    return corpus


def _check(config: DataConfig) -> None:
    """Check that settings which are made for utterances have their defaults."""
    share, remedy = config.text_share, "give texts, which are conversations too, a share of `mix`"
    check(share is None, "data.text_share", "be null for conversations", share, remedy)
    filters = [f"filters.{field.name}" for field in fields(FilterConfig)]
    filters.remove("filters.max_dropped")
    names = "strategy", "speed_perturbation", "silence_padding", "timestamps", *filters
    config.check_defaults(names, "for conversations")


class _Builder:
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
        self.limits = replace(config.limits(), frame_budget=config.known_frame_budget)
        self.dropped: list[Dropped] = []
        self.ids, self.coded = RaggedBuilder(), RaggedBuilder("i")
        self.clips = AudioColumnsBuilder()
        self.clip_ends = array("q", [0])
        self.frames, self.rows, self.sources = array("i"), array("i"), array("H")
        self.samples = array("q")
        self.divided = 0
        # Encoder frames; 0 before the first clip.
        self.shortest_clip = self.longest_clip = 0

    def add(self, conversation: Conversation, source: int) -> None:
        audio, seconds = conversation.origin, None
        try:
            if conversation.problem is not None:
                raise conversation.problem
            cuts = []
            for clip in conversation.clips:
                audio = clip.audio
                cuts.append(clip.cut(clip.id))
            audio = conversation.origin
            seconds = sum(cut.duration for cut in cuts)
            examples = training_rows(conversation.messages, self.tokenizer)
        except (AudioError, RejectedUtterance) as error:
            reason = error.problem if isinstance(error, AudioError) else error.reason
            self.dropped.append(Dropped(conversation.id, reason, str(error), audio, seconds))
            return
        self.divided += len(examples) > 1
        for number, (turns, coded) in enumerate(examples, 1):
            name = f"{conversation.id}-answer-{number}" if len(examples) > 1 else conversation.id
            speech = cuts[: num_clips(conversation.messages[:turns])]
            try:
                self._add(name, speech, coded, source)
            except RejectedUtterance as error:
                seconds = sum(cut.duration for cut in speech)
                self.dropped.append(Dropped(name, error.reason, str(error), audio, seconds))

    def _add(self, name: str, cuts: Sequence[Cut], coded: np.ndarray, source: int) -> None:
        samples = [samples_in(cut.duration) for cut in cuts]
        frames = [self.framing.frames(count) for count in samples]
        rows = num_rows(coded, [-(-count // self.stack) for count in frames])
        self._check(cuts, frames, coded, rows)
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

    def _check(
        self, cuts: Sequence[Cut], frames: Sequence[int], coded: np.ndarray, rows: int
    ) -> None:
        for cut in cuts:
            require(DURATION_RULES, Lengths(cut.duration), self.limits)
        require(FRAME_RULES, Lengths(1.0, sum(frames)), self.limits)
        longest = max(frames, default=0)
        if self.max_frames is not None and longest > self.max_frames:
            details = f"{longest} encoder frames, over {self.max_frames}"
            raise RejectedUtterance(Reason.MODEL, details)
        if not num_targets(coded):
            raise RejectedUtterance(Reason.EMPTY_TEXT, "there is nothing to write")
        limits = (
            (Reason.TOKEN_BUDGET, self.config.token_budget),
            (Reason.MODEL, self.max_rows),
        )
        for reason, limit in limits:
            if limit is not None and rows > limit:
                details = f"{rows} rows of the language model, over {limit}"
                raise RejectedUtterance(reason, details)

    def corpus(self) -> ConversationCorpus:
        config = self.config
        lengths = UtteranceLengths(to_numpy(self.frames), to_numpy(self.rows))
        budget = config.token_budget or self._suggested_budget(lengths)
        is_kept = lengths.tokens <= budget
        selected = np.flatnonzero(is_kept)
        ids, coded, clips = self.ids.build(), self.coded.build(), self.clips.build()
        for index in np.flatnonzero(~is_kept).tolist():
            details = (
                f"{lengths.tokens[index]} rows, over {budget}, which was derived from "
                "`frame_budget`: set `token_budget` to keep it"
            )
            name, seconds = decode(ids[index]), self.samples[index] / SAMPLE_RATE
            self.dropped.append(Dropped(name, Reason.TOKEN_BUDGET, details, "", seconds))
        check_share(self.dropped, len(self.dropped) + len(selected), config.filters.max_dropped)
        clip_ends, samples = to_numpy(self.clip_ends), to_numpy(self.samples)
        sources, clip_counts = to_numpy(self.sources), np.diff(clip_ends)
        if len(selected) < len(lengths):
            lengths = lengths.take(selected)
            ids, coded = ids.take(selected), coded.take(selected)
            samples, sources = samples[selected], sources[selected]
            clips = clips.take(np.flatnonzero(np.repeat(is_kept, clip_counts)))
            clip_counts = clip_counts[selected]
            clip_ends = np.concatenate([[0], np.cumsum(clip_counts)]).astype(np.int64)
        mixture = None
        if config.mix is not None:
            mixture = epoch_mixture(config.mix, lengths, sources)
        shape, max_clips = static_shape(
            lengths,
            config.known_frame_budget if lengths.frames.any() else 1,
            budget,
            framing=self.framing,
            shortest_clip=self.shortest_clip,
            most_clips=int(clip_counts.max()),
            max_sequences=config.max_sequences,
            usual=epoch_lengths(lengths, sources, mixture)[0],
        )
        if mixture is not None:
            mixture = of_whole_steps(mixture, lengths, sources, shape, config.micro_batches)
        return ConversationCorpus(
            lengths=lengths,
            shape=shape,
            dropped=tuple(self.dropped),
            seconds=float(samples.sum()) / SAMPLE_RATE,
            samples=samples,
            sources=sources,
            mixture=mixture,
            fingerprint=digest(
                [lengths.frames, lengths.tokens, coded.values, coded.offsets, sources]
            ),
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

    def _suggested_budget(self, lengths: UtteranceLengths) -> int:
        """Return the token budget that an epoch fills along with the frame budget."""
        config = self.config
        rule = "be given for conversations without speech"
        remedy = "set it to the rows of the language model in a micro-batch"
        check(lengths.frames.any(), "data.token_budget", rule, "null", remedy)
        mixture, sources = None, to_numpy(self.sources)
        if config.mix is not None:
            mixture = epoch_mixture(config.mix, lengths, sources)
        return token_budget(lengths, sources, mixture, config.known_frame_budget)
