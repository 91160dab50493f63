"""Packs utterances, or text pairs, into a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch

from effasr.data.batch import IGNORED, Batch, StaticShape
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr_kernels import PackedLayout, PackedSequence


@dataclass(frozen=True, slots=True)
class Example:
    """One utterance, ready to be packed."""

    id: str
    audio: np.ndarray  # float32 (samples,), mono, at `SAMPLE_RATE`
    prompt: list[int]  # token ids that the decoder is given; at least one
    # token ids that it must write, without the end token; None without a text
    text: list[int] | None
    monotonic: bool = True  # see `Batch.monotonic`
    reserved: int = 0  # tokens of a label that a teacher writes; 0 with a text, or for audio alone
    expert: int | None = None  # see `Batch.expert`
    spoken: list[int] | None = None  # ``text`` without times, for CTC; None if it has none

    def map_audio(self, function: Callable[[np.ndarray], np.ndarray]) -> "Example":
        return replace(self, audio=function(self.audio))


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text and its translation, ready to be packed."""

    id: str
    source: list[int]  # token ids that the text encoder reads; at least one
    prompt: list[int]  # token ids that the decoder is given; at least one
    text: list[int]  # token ids that it must write, without the end token
    expert: int | None = None  # see `Batch.expert`


def collate(
    examples: Sequence[Example],
    shape: StaticShape | None = None,
    *,
    eos_id: int,
    pad_id: int,
    padded: bool = False,
    framing: Framing | None = None,
) -> Batch:
    """Pack utterances on the CPU, with a tail up to a static shape if one is given.

    The decoder reads ``prompt + text`` and must say ``text + [eos]`` from the prompt's last token
    on; earlier targets are `IGNORED`. In the tail audio is zero, tokens and text are ``pad_id``
    and targets are `IGNORED`.

    With ``padded`` every utterance is made as long as the longest, in exact sizes: audio by
    silence, tokens by ``pad_id``, targets by `IGNORED`. To the model they are utterances of that
    length, and nothing masks what was added; only ``text``, and with it the CTC and transducer
    losses, stays as it is.
    """
    if padded and shape is not None:
        raise ValueError("`shape` must be None for a padded batch: its longest utterance gives it.")
    tokens, targets = _decoder_rows(examples, eos_id)
    samples = [example.audio.shape[0] for example in examples]
    if framing is None:
        framing = FASTCONFORMER if shape is None else shape.framing
    frames = [framing.frames(length) for length in samples]
    frame_lengths, token_lengths = tuple(frames), tuple(map(len, tokens))
    if padded:
        samples, frames = ([max(x, default=0)] * len(x) for x in (samples, frames))
        tokens, targets = _extended(tokens, pad_id), _extended(targets, IGNORED)
    count, frame_rows, token_rows, audio_rows = len(examples), None, None, None
    longest_frames = longest_tokens = None
    if shape is not None:
        reserved = sum(example.reserved for example in examples)
        _check_fits(shape, len(examples), sum(frame_lengths), sum(token_lengths) + reserved)
        _check_nodes(shape, examples, frame_lengths)
        count, audio_rows = shape.max_sequences, shape.audio_rows
        frame_rows, token_rows = shape.frame_budget, shape.token_budget
        longest_frames, longest_tokens = shape.longest_frames, shape.longest_tokens
    texts = [(x.spoken or x.text or []) if x.monotonic else [] for x in examples]
    monotonic = [example.monotonic and example.text is not None for example in examples]
    return Batch(
        audio=_pack_audio(examples, samples, audio_rows, count),
        frames=PackedLayout.from_lengths(
            frames, rows=frame_rows, num_sequences=count, static_max_seqlen=longest_frames
        ),
        tokens=_pack_ids(tokens, token_rows, count, pad_id, longest_tokens),
        targets=_pack_ids(targets, token_rows, count, IGNORED, longest_tokens).values,
        text=_pack_ids(texts, token_rows, count, pad_id, longest_tokens),
        monotonic=torch.tensor(monotonic + [False] * (count - len(examples)), dtype=torch.bool),
        ids=tuple(example.id for example in examples),
        audio_seconds=sum(example.audio.shape[0] for example in examples) / SAMPLE_RATE,
        num_targets=sum(map(_count_targets, examples, frame_lengths)),
        num_monotonic_targets=sum(compress((len(text) + 1 for text in texts), monotonic)),
        frame_lengths=frame_lengths,
        token_lengths=token_lengths,
        label_room=_label_room(examples, count),
        expert=_experts(examples, count),
        node_budget=None if shape is None else shape.node_budget,
    )


def collate_text(
    examples: Sequence[TextExample],
    shape: StaticShape,
    *,
    eos_id: int,
    pad_id: int,
    aligned: bool = False,
) -> Batch:
    """Pack text pairs into a static shape, on the CPU.

    As in `collate`, but the decoder attends to `Batch.source`, and there is no audio. CTC and the
    transducer learn nothing, unless texts are ``aligned``: they learn to write the source, without
    its end. The frames of the shape are the text encoder's.
    """
    count, rows, longest = shape.max_sequences, shape.token_budget, shape.longest_tokens
    tokens, targets = _decoder_rows(examples, eos_id)
    read = [example.source for example in examples]
    _check_fits(shape, len(examples), sum(map(len, read)), sum(map(len, tokens)))
    longest_read = shape.longest_frames
    source = _pack_ids(read, shape.frame_budget, count, pad_id, longest_read)
    num_targets = sum(len(example.text) + 1 for example in examples)
    no_audio = PackedLayout.from_lengths([], num_sequences=count, static_max_seqlen=0)
    return Batch(
        audio=PackedSequence(torch.zeros(0), no_audio),
        frames=source.layout,
        tokens=_pack_ids(tokens, rows, count, pad_id, longest),
        targets=_pack_ids(targets, rows, count, IGNORED, longest).values,
        text=_pack_ids([x[:-1] for x in read], shape.frame_budget, count, pad_id, longest_read)
        if aligned
        else _pack_ids([], 0, count, pad_id, 0),
        monotonic=torch.arange(count) < (len(examples) if aligned else 0),
        ids=tuple(example.id for example in examples),
        audio_seconds=0.0,
        num_targets=num_targets,
        num_monotonic_targets=sum(map(len, read)) if aligned else 0,
        frame_lengths=tuple(map(len, read)),
        token_lengths=tuple(map(len, tokens)),
        source=source,
        expert=_experts(examples, count),
    )


def with_experts(batch: Batch) -> Batch:
    """Return a batch that names experts also where it has no utterance, as batches of one shape."""
    if batch.expert is not None:
        return batch
    return replace(batch, expert=torch.zeros(batch.tokens.layout.num_sequences, dtype=torch.int64))


def _decoder_rows(
    examples: Sequence[Example] | Sequence[TextExample], eos_id: int
) -> tuple[list[list[int]], list[list[int]]]:
    tokens: list[list[int]] = []
    targets: list[list[int]] = []
    for example in examples:
        if example.text is None:
            tokens.append([])
            targets.append([])
            continue
        if not example.prompt:
            raise ValueError(f"{example.id}: `prompt` must have at least one token, but is empty.")
        tokens.append(example.prompt + example.text)
        targets.append([IGNORED] * (len(example.prompt) - 1) + example.text + [eos_id])
    return tokens, targets


def _count_targets(example: Example, frames: int) -> int:
    """Return the number of targets: tokens, or frames in training on audio alone."""
    if example.text is not None:
        return len(example.text) + 1
    # A teacher knows the number of targets when it has written the label.
    return 0 if example.reserved else frames


def _label_room(examples: Sequence[Example], count: int) -> torch.Tensor | None:
    """Return the tokens reserved for the label of each utterance, int64 (N,), if there are any."""
    reserved = [example.reserved for example in examples]
    if not any(reserved):
        return None
    return torch.tensor(reserved + [0] * (count - len(reserved)), dtype=torch.int64)


def _experts(
    examples: Sequence[Example] | Sequence[TextExample], count: int
) -> torch.Tensor | None:
    """Return the expert of each utterance, int64 (N,); None where no utterance has one."""
    experts = [example.expert for example in examples if example.expert is not None]
    if not experts:
        return None
    return torch.tensor(experts + [0] * (count - len(experts)), dtype=torch.int64)


def _check_fits(shape: StaticShape, sequences: int, frames: int, tokens: int) -> None:
    filled = {"max_sequences": sequences, "frame_budget": frames, "token_budget": tokens}
    for name, rows in filled.items():
        limit = getattr(shape, name)
        if rows > limit:
            raise ValueError(
                f"collate: the batch must fit in `{name}` = {limit}, but fills {rows}: "
                "give it fewer utterances."
            )


def _check_nodes(shape: StaticShape, examples: Sequence[Example], frames: Sequence[int]) -> None:
    if shape.node_budget is None:
        return
    sizes = zip(examples, frames, strict=True)
    nodes = sum(t * (len(x.prompt) + len(x.text or []) + x.reserved) for x, t in sizes)
    if nodes > shape.node_budget:
        raise ValueError(
            f"collate: the batch must fit in `node_budget` = {shape.node_budget}, but its frames "
            f"times tokens are {nodes}: give it fewer utterances."
        )


def _pack_ids(
    sequences: Sequence[list[int]], rows: int | None, count: int, fill: int, longest: int | None
) -> PackedSequence:
    """Pack token ids into ``rows``, whose tail has the value ``fill``."""
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
