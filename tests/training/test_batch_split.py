import pytest
import torch

from effasr.data.collate import collate
from effasr.training.fault_tolerance.oom_recovery import split, utterances
from tests.training.conftest import make_batch


def test_the_parts_hold_what_the_whole_held(batches):
    whole = batches[0]
    parts = split(whole)
    assert parts[0].ids + parts[1].ids == whole.ids
    for name in ("audio", "tokens", "text"):
        packed = getattr(whole, name)
        together = [piece for part in parts for piece in getattr(part, name).unpack()]
        for piece, expected in zip(together, packed.unpack(), strict=False):
            assert torch.equal(piece, expected), name
    assert sum(part.audio_seconds for part in parts) == pytest.approx(whole.audio_seconds)
    for name in ("num_targets", "num_monotonic_targets", "num_frames", "num_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    targets = torch.cat([part.targets for part in parts])
    assert torch.equal(targets, whole.targets[: whole.tokens.layout.total])
    frames = [length for part in parts for length in part.frames.lengths]
    assert frames == list(whole.frames.lengths[:3])


def test_the_parts_have_no_tail_and_no_memory_of_the_whole(batches):
    whole = batches[0]
    first, _ = split(whole)
    assert not first.frames.has_tail
    assert first.audio.values.shape[0] == first.audio.layout.total
    assert first.audio.values.untyped_storage().nbytes() < whole.audio.values.nbytes
    assert first.monotonic.shape == (len(first.ids),)


def test_the_cut_is_in_the_middle_of_the_work():
    whole = make_batch(3)
    sizes = [n + 5 for n in whole.frames.lengths[:3]]
    first, second = split(whole)
    best = min(abs(2 * sum(sizes[:place]) - sum(sizes)) for place in (1, 2))
    assert abs(sum(sizes[: len(first.ids)]) - sum(sizes[len(first.ids) :])) == best
    assert len(second.ids) == 3 - len(first.ids)


def test_a_single_utterance_cannot_be_split(batches):
    alone = utterances(batches[0], 1, 2)
    assert alone.ids == ("0-1",)
    assert (alone.num_targets, alone.num_monotonic_targets) == (4, 0)
    with pytest.raises(ValueError, match=r"`batch` must have two utterances or more .* has 1"):
        split(alone)
    with pytest.raises(ValueError, match="has 0"):
        split(collate([], eos_id=1, pad_id=0))
