"""Grouping of utterances into packed batches for decoding."""

from collections.abc import Sequence

from effasr.checks import check


def plan_batches(
    frames: Sequence[int], frame_budget: int, max_sequences: int = 256
) -> list[list[int]]:
    """Group utterances, longest first, into batches of at most ``frame_budget`` frames.

    Utterances of similar length take about equally many decoder steps, so few rows wait for the
    last one; and a batch that exceeds the memory comes first, not after an hour.
    """
    check(frame_budget >= 1, "frame_budget", "be at least 1", frame_budget)
    check(max_sequences >= 1, "max_sequences", "be at least 1", max_sequences)
    batches: list[list[int]] = []
    frames_left = 0
    for index in sorted(range(len(frames)), key=lambda i: -frames[i]):
        if not batches or frames[index] > frames_left or len(batches[-1]) == max_sequences:
            batches.append([])
            frames_left = frame_budget
        batches[-1].append(index)
        frames_left -= frames[index]
    return batches
