"""The static shape of batches of conversations."""

from __future__ import annotations

from collections.abc import Sequence

from effasr.data.batch import StaticShape
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.plan import UtteranceLengths

_SHORTEST = 8
"""Rows of a very short conversation, for the number of sequences of a batch."""


def static_shape(
    lengths: UtteranceLengths,
    frame_budget: int,
    token_budget: int,
    *,
    framing: Framing,
    shortest_clip: int,
    most_clips: int,
    max_sequences: int | None = None,
) -> tuple[StaticShape, int]:
    """Return the static shape of batches of these conversations, and the most clips of a batch.

    ``lengths`` and budgets are encoder frames and rows of the language model, ``shortest_clip`` is
    in encoder frames, ``most_clips`` of a conversation.
    """
    shortest = max(_SHORTEST, int(lengths.tokens.min()))
    sequences = max_sequences or max(framing.sequences(frame_budget), -(-token_budget // shortest))
    shape = StaticShape(
        frame_budget,
        token_budget,
        sequences,
        longest_frames=max(1, int(lengths.frames.max())),
        longest_tokens=max(1, int(lengths.tokens.max())),
        framing=framing,
    )
    by_frames = frame_budget // max(1, shortest_clip)
    return shape, max(1, min(by_frames, sequences * most_clips))


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
