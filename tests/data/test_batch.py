import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from effasr.data.batch import IGNORED, BatchTransfer, StaticShape, _transferred
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import Framing

EOS, PAD = 2, 1


def example(samples, text, *, monotonic=True, name="u"):
    audio = np.arange(1, samples + 1, dtype=np.float32)
    return Example(name, audio, [10, 11, 12], text, monotonic)


def collated(examples, shape=None, **options):
    return collate(examples, shape, eos_id=EOS, pad_id=PAD, **options)


def two():
    return [example(1600, [5, 6]), example(3000, [7], monotonic=False, name="v")]


def test_exact_sizes():
    batch = collated(two())
    assert batch.ids == ("u", "v")
    assert batch.audio.layout.cu_seqlens_host == (0, 1600, 4600)
    assert batch.audio.values[1599:1602].tolist() == [1600.0, 1.0, 2.0]
    assert batch.frames.lengths == (Framing().frames(1600), Framing().frames(3000)) == (2, 3)
    assert batch.tokens.values.tolist() == [10, 11, 12, 5, 6, 10, 11, 12, 7]
    expected = [IGNORED, IGNORED, 5, 6, EOS, IGNORED, IGNORED, 7, EOS]
    assert batch.targets.tolist() == expected
    assert batch.text.values.tolist() == [5, 6]
    assert batch.text.layout.lengths == (2, 0)
    assert batch.monotonic.tolist() == [True, False]
    assert (batch.num_targets, batch.num_monotonic_targets) == (5, 3)
    assert batch.audio_seconds == pytest.approx(4600 / 16_000)
    assert batch.audio.values.dtype == torch.float32
    for values in (batch.tokens.values, batch.targets, batch.text.values):
        assert values.dtype == torch.int64


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=6))
def test_audio_always_fits_where_its_frames_do(samples):
    frames = sum(map(Framing().frames, samples))
    shape = StaticShape(max(1, frames), 8 * len(samples), len(samples))
    batch = collated([example(n, [5]) for n in samples], shape)
    assert batch.frames.total == frames
    assert batch.audio.layout.total == sum(samples)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (StaticShape(3, 99, 9), "must fit in `frame_budget` = 3, but fills 4: give it fewer"),
        (StaticShape(99, 7, 9), "must fit in `token_budget` = 7, but fills 8"),
        (StaticShape(99, 99, 9, node_budget=15), "must fit in `node_budget` = 15, but its frames"),
        (StaticShape(99, 99, 1), "must fit in `max_sequences` = 1, but fills 2"),
    ],
)
def test_over_full_batches_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        collated([example(1600, [5]), example(1600, [6])], shape)


def test_what_no_batch_can_have_is_refused():
    bare = Example("u", np.zeros(1600, np.float32), [], [5])
    with pytest.raises(ValueError, match="u: `prompt` must have at least one token"):
        collated([bare])
    with pytest.raises(ValueError, match="`shape` must be None for a padded batch"):
        collated([], StaticShape(10, 8, 4), padded=True)
    for name in ("frame_budget", "token_budget", "max_sequences"):
        sizes = {"frame_budget": 1, "token_budget": 1, "max_sequences": 1} | {name: 0}
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, but is 0"):
            StaticShape(**sizes)


def test_padding_makes_every_utterance_as_long_as_the_longest():
    batch, exact = collated(two(), padded=True), collated(two())
    assert batch.audio.layout.cu_seqlens_host == (0, 3000, 6000)
    assert batch.audio.values[1599:1602].tolist() == [1600.0, 0.0, 0.0]
    assert batch.audio.values[2999:3002].tolist() == [0.0, 1.0, 2.0]
    assert batch.frames.lengths == (3, 3)
    assert batch.tokens.values.tolist() == [10, 11, 12, 5, 6, 10, 11, 12, 7, PAD]
    assert batch.targets.tolist() == [*exact.targets.tolist(), IGNORED]
    assert torch.equal(batch.text.values, exact.text.values)
    assert batch.text.layout.lengths == exact.text.layout.lengths
    # What counts is as without padding.
    counts = ("num_frames", "num_tokens", "num_targets", "num_monotonic_targets", "audio_seconds")
    for name in counts:
        assert getattr(batch, name) == getattr(batch.to("cpu"), name) == getattr(exact, name)
    assert collated([], padded=True).frames.rows == 0


class Transfers(TorchDispatchMode):
    """Lists the bytes of each copy to another device."""

    def __init__(self):
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.found.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_small_tensors_are_one_transfer():
    provided = [example(1600, [5, 6]), example(400_000, [7], monotonic=False, name="v")]
    batch = collated(provided)
    with Transfers() as transfers:
        moved = batch.to("meta")
    audio, *other_items = batch.tensors()
    assert sorted(transfers.found) == [512 * len(other_items), audio.nbytes]
    for x, y in zip(batch.tensors(), moved.tensors(), strict=True):
        assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, x.dtype)
    assert moved.frames.lengths == batch.frames.lengths
    assert (moved.ids, moved.num_targets) == (batch.ids, batch.num_targets)
    # What is on the device is not copied, back to the host least of all.
    labelled = replace(batch, text=moved.text, monotonic=moved.monotonic)
    with Transfers() as transfers:
        again = labelled.to("meta")
    assert again.text.values is moved.text.values
    assert again.monotonic is moved.monotonic
    assert sorted(transfers.found) == [512 * (len(other_items) - 3), audio.nbytes]


@pytest.mark.parametrize(
    ("samples", "dtype"),
    [
        (np.arange(-(2**15), 2**15), torch.int16),
        # A full scale that no 16 bits hold, half a step, and what is not a number.
        ([2**15], torch.float32), ([0.5], torch.float32), ([np.nan, 1], torch.float32),
        ([1e30], torch.float32), ([], torch.int16),
    ],
)  # fmt: skip
def test_audio_is_narrowed_where_that_is_exact(samples, dtype):
    audio = (np.asarray(samples) / 2**15).astype(np.float32)
    batch = collated([Example("u", audio, [10], [5])])
    narrow = batch.narrowed()
    assert narrow.audio.values.dtype == dtype
    for part in (narrow.to("cpu"), batch):
        assert part.audio.values.numpy().tobytes() == audio.tobytes()
    assert narrow.to("meta").audio.values.dtype == torch.float32


def test_a_copy_waits_for_the_batch_before_the_last(monkeypatch):
    """And not for the one whose memory it does not take."""
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def record_event(self):
            log.append((self.name, "records", len(log)))
            return len(log) - 1

        def wait_event(self, event):
            log.append((self.name, "waits", event))

    work, copies = Stream("work"), Stream("copies")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: work)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    transfer, held = BatchTransfer(torch.device("meta")), []
    for _ in range(4):
        transferred = transfer(collated(two()))
        assert transferred.audio.values.is_meta
        # The memory of the last one is not free as long as the work on it may go on.
        assert all(earlier() is None for earlier in held[:-1])
        held.append(weakref.ref(transferred.audio.values))
        del transferred
        assert held[-1]() is not None
    waits = [entry for entry in log if entry[:2] == ("copies", "waits")]
    begins = [event for name, kind, event in log if (name, kind) == ("work", "records")]
    assert [event for _, _, event in waits] == begins[:3]
    ends = [event for name, kind, event in log if (name, kind) == ("copies", "records")]
    assert [e for name, kind, e in log if (name, kind) == ("work", "waits")] == ends


def test_a_transfer_keeps_the_values():
    provided = [torch.arange(3), torch.tensor([True, False]), torch.zeros(0), torch.ones(2**18 + 1)]
    provided.append(torch.arange(200).view(2, 100).T)
    result = _transferred(provided, torch.device("cpu"))
    for x, y in zip(provided, result, strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    first, second = result[0].untyped_storage().data_ptr(), result[1].data_ptr()
    assert second == first + 512
