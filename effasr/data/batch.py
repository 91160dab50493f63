"""One micro-batch: packed audio, packed tokens, and the layouts they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr_kernels import PackedLayout, PackedSequence

IGNORED = -100
"""Target of a token row that no loss counts: a prompt, or the tail of a static shape."""


@dataclass(frozen=True, slots=True)
class StaticShape:
    """The one shape of every batch of a run.

    Attributes:
        frame_budget: T, encoder frames of a batch, the tail included.
        token_budget: U, decoder tokens (prompts and texts) of a batch, the tail included.
        max_sequences: N, utterances of a batch, empty ones included.
        longest_frames: Encoder frames that no utterance exceeds; by default the budget.
        longest_tokens: Decoder tokens that no utterance exceeds; by default the budget.
        framing: How many samples an encoder frame stands for.
    """

    frame_budget: int
    token_budget: int
    max_sequences: int
    longest_frames: int | None = None
    longest_tokens: int | None = None
    framing: Framing = FASTCONFORMER

    def __post_init__(self) -> None:
        for name in ("frame_budget", "token_budget", "max_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        for name, budget in (
            ("longest_frames", self.frame_budget),
            ("longest_tokens", self.token_budget),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, budget)

    @property
    def audio_rows(self) -> int:
        """Samples of a batch, the tail included.

        An utterance of n frames has fewer than 1280 n + 160 samples, or likewise with another
        framing, so this is always enough.
        """
        return (self.frame_budget + self.max_sequences) * self.framing.samples


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance, ready to be packed.

    Attributes:
        id: Its name.
        audio: float32 (samples,), mono, at `SAMPLE_RATE`.
        prompt: Token ids that the decoder is given; at least one.
        text: Token ids that it must write, without the end token.
        monotonic: Whether the text follows the speech in order; see `Batch.monotonic`.
    """

    id: str
    audio: np.ndarray
    prompt: list[int]
    text: list[int]
    monotonic: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the model needs for one forward and backward.

    All layouts have the same N; the sequences past ``len(ids)`` are empty.

    Attributes:
        audio: float32 (samples,), mono, at the model's sample rate.
        frames: Layout of the encoder's output frames, T rows.
        tokens: int64 (U,), what the decoder reads: prompt, then transcript.
        targets: int64 (U,), what it must say next; `IGNORED` in prompts and in the tail.
        text: int64 (U',), the transcript alone, for CTC and the transducer.
        monotonic: bool (N,), whether the text follows the speech in order (a transcription,
            not a translation), so that CTC and guided attention apply; else its ``text`` is empty.
        ids: The utterances, in order.
        audio_seconds: Their total duration in seconds.
    """

    audio: PackedSequence
    frames: PackedLayout
    tokens: PackedSequence
    targets: Tensor
    text: PackedSequence
    monotonic: Tensor
    ids: tuple[str, ...]
    audio_seconds: float
    num_targets: int
    """Rows of ``targets`` that a loss counts."""
    num_monotonic_targets: int
    """Those of them that belong to a transcription."""
    frame_lengths: tuple[int, ...]
    """Encoder frames of each utterance; ``frames`` also counts silence put after it."""
    token_lengths: tuple[int, ...]
    """Tokens of each utterance; ``tokens.layout`` also counts padding put after it."""
    source: PackedSequence | None = None
    """Of a text-only batch, int64 (T,): what the text encoder reads. Then ``audio`` has no row, and
    ``frames`` is the layout of this."""

    @property
    def num_frames(self) -> int:
        """Encoder frames of all utterances, without any padding."""
        return sum(self.frame_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all utterances, without any padding."""
        return sum(self.token_lengths)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device; asynchronous from pinned memory."""
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.audio.to(**move),
            self.frames.to(**move),
            self.tokens.to(**move),
            self.targets.to(**move),
            self.text.to(**move),
            self.monotonic.to(**move),
            self.ids,
            self.audio_seconds,
            self.num_targets,
            self.num_monotonic_targets,
            self.frame_lengths,
            self.token_lengths,
            None if self.source is None else self.source.to(**move),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the batch, in a fixed order."""
        return (
            self.audio.values,
            self.audio.layout.cu_seqlens,
            self.frames.cu_seqlens,
            self.tokens.values,
            self.tokens.layout.cu_seqlens,
            self.targets,
            self.text.values,
            self.text.layout.cu_seqlens,
            self.monotonic,
            *([] if self.source is None else [self.source.values]),
        )

    def rewritable(self) -> Batch:
        """The same batch in memory of its own, which may be overwritten with another's tensors.

        Its counts and names stay those of this one.
        """
        audio, tokens, text = (
            PackedSequence(packed.values.clone(), packed.layout.rewritable())
            for packed in (self.audio, self.tokens, self.text)
        )
        return replace(
            self,
            audio=audio,
            frames=self.frames.rewritable(),
            tokens=tokens,
            targets=self.targets.clone(),
            text=text,
            monotonic=self.monotonic.clone(),
        )

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory; called by torch's DataLoader."""
        return Batch(
            self.audio.pin_memory(),
            self.frames.pin_memory(),
            self.tokens.pin_memory(),
            self.targets.pin_memory(),
            self.text.pin_memory(),
            self.monotonic.pin_memory(),
            self.ids,
            self.audio_seconds,
            self.num_targets,
            self.num_monotonic_targets,
            self.frame_lengths,
            self.token_lengths,
            None if self.source is None else self.source.pin_memory(),
        )


def collate(
    examples: Sequence[Example],
    shape: StaticShape | None = None,
    *,
    eos_id: int,
    pad_id: int,
    padded: bool = False,
    framing: Framing | None = None,
) -> Batch:
    """Pack utterances, with a tail up to a static shape if one is given.

    The decoder reads ``prompt + text`` and must say ``text + [eos]`` from the prompt's last token
    on; earlier targets are `IGNORED`. In the tail audio is zero, tokens and text are ``pad_id``
    and targets are `IGNORED`.

    Args:
        examples: The utterances; none at all is a batch of tails.
        shape: The static shape; exact sizes by default.
        eos_id: The token that ends a text.
        pad_id: The token of the tail, and of padding.
        padded: Whether every utterance is made as long as the longest, in exact sizes: audio by
            silence, tokens by ``pad_id``, targets by `IGNORED`. To the model they are utterances
            of that length, and nothing masks what was added; only ``text``, and with it the CTC
            and transducer losses, stays as it is.
        framing: How many encoder frames utterances have; by default the shape's, else a
            FastConformer's.

    Returns:
        The batch, on the CPU.

    Raises:
        ValueError: A prompt is empty, the utterances do not fit in the shape, or both a shape and
            padding are asked for.
    """
    if padded and shape is not None:
        raise ValueError("`shape` must be None for a padded batch: its longest utterance gives it.")
    for example in examples:
        if not example.prompt:
            raise ValueError(f"{example.id}: `prompt` must have at least one token, but is empty.")
    samples = [example.audio.shape[0] for example in examples]
    if framing is None:
        framing = FASTCONFORMER if shape is None else shape.framing
    frames = [framing.frames(length) for length in samples]
    tokens = [example.prompt + example.text for example in examples]
    frame_lengths, token_lengths = tuple(frames), tuple(map(len, tokens))
    targets = [
        [IGNORED] * (len(example.prompt) - 1) + example.text + [eos_id] for example in examples
    ]
    texts = [example.text if example.monotonic else [] for example in examples]
    counted = [len(example.text) + 1 for example in examples]
    if padded:
        samples, frames = ([max(x, default=0)] * len(x) for x in (samples, frames))
        tokens, targets = _extended(tokens, pad_id), _extended(targets, IGNORED)
    count, frame_rows, token_rows, audio_rows = len(examples), None, None, None
    longest_frames = longest_tokens = None
    if shape is not None:
        check_fits(shape, len(examples), sum(frame_lengths), sum(token_lengths))
        count, audio_rows = shape.max_sequences, shape.audio_rows
        frame_rows, token_rows = shape.frame_budget, shape.token_budget
        longest_frames, longest_tokens = shape.longest_frames, shape.longest_tokens
    monotonic = [example.monotonic for example in examples]
    return Batch(
        audio=_pack_audio(examples, samples, audio_rows, count),
        frames=PackedLayout.from_lengths(
            frames, rows=frame_rows, num_sequences=count, static_max_seqlen=longest_frames
        ),
        tokens=pack_ids(tokens, token_rows, count, pad_id, longest_tokens),
        targets=pack_ids(targets, token_rows, count, IGNORED, longest_tokens).values,
        text=pack_ids(texts, token_rows, count, pad_id, longest_tokens),
        monotonic=torch.tensor(monotonic + [False] * (count - len(examples)), dtype=torch.bool),
        ids=tuple(example.id for example in examples),
        audio_seconds=sum(example.audio.shape[0] for example in examples) / SAMPLE_RATE,
        num_targets=sum(counted),
        num_monotonic_targets=sum(compress(counted, monotonic)),
        frame_lengths=frame_lengths,
        token_lengths=token_lengths,
    )


def check_fits(shape: StaticShape, sequences: int, frames: int, tokens: int) -> None:
    """Check that utterances fit in a static shape.

    Raises:
        ValueError: They do not.
    """
    filled = {"max_sequences": sequences, "frame_budget": frames, "token_budget": tokens}
    for name, rows in filled.items():
        limit = getattr(shape, name)
        if rows > limit:
            raise ValueError(
                f"collate: the batch must fit in `{name}` = {limit}, but fills {rows}: "
                "give it fewer utterances."
            )


def pack_ids(
    sequences: Sequence[list[int]], rows: int | None, count: int, fill: int, longest: int | None
) -> PackedSequence:
    """Pack token ids.

    Args:
        sequences: The token ids.
        rows: Of the packed tensor; by default as many as there are ids.
        count: Sequences of the layout; the last ones are empty.
        fill: Value of the tail.
        longest: What no sequence exceeds; None where it is not known beforehand.
    """
    lengths = [len(sequence) for sequence in sequences]
    layout = PackedLayout.from_lengths(
        lengths, rows=rows, num_sequences=count, static_max_seqlen=longest
    )
    values = torch.full((layout.rows,), fill, dtype=torch.int64)
    values[: layout.total] = torch.tensor(
        [token for sequence in sequences for token in sequence], dtype=torch.int64
    )
    return PackedSequence(values, layout)


def _extended(sequences: list[list[int]], fill: int) -> list[list[int]]:
    """Make all as long as the longest."""
    longest = max(map(len, sequences), default=0)
    return [sequence + [fill] * (longest - len(sequence)) for sequence in sequences]


def _pack_audio(
    examples: Sequence[Example], lengths: Sequence[int], rows: int | None, count: int
) -> PackedSequence:
    """Lay out the waveforms in sequences of these lengths, each followed by silence."""
    layout = PackedLayout.from_lengths(lengths, rows=rows, num_sequences=count)
    values = np.zeros(layout.rows, dtype=np.float32)
    for begin, example in zip(layout.cu_seqlens_host, examples, strict=False):
        values[begin : begin + example.audio.shape[0]] = example.audio
    return PackedSequence(torch.from_numpy(values), layout)
