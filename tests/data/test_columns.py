import os

import numpy as np
import pytest
from lhotse import AudioSource, MonoCut, MultiCut, Recording
from lhotse.cut import Cut

from effasr.data.audio.embedded import TarMember
from effasr.data.audio.waveform import AudioSegment, audio_path, load_audio
from effasr.data.index.columns import AudioColumnsBuilder, RaggedBuilder
from effasr.data.manifest.cuts import audio_of


def cut_of(path, channel, kind="file", channels=3):
    recording = Recording(
        "r", [AudioSource(kind, list(range(channels)), path)], 16_000, 32_000, 2.0,
        channel_ids=list(range(channels)),
    )  # fmt: skip
    cls = MonoCut if isinstance(channel, int) else MultiCut
    return cls(f"cut of {path} {channel}", 0.1 + 0.2, 1 / 3, channel, recording=recording)  # type: ignore[arg-type]


CUTS = {
    "mono": cut_of("/a/b.wav", 0),
    "second channel": cut_of("/a/b.wav", 1),
    "all channels": cut_of("/a/b.wav", [0, 1, 2]),
    "first channels": cut_of("/a/b.wav", [0, 1]),
    "tar member": cut_of(str(TarMember("/a/x y.tar", 1536, 99)), 0, "shar"),
    "name in another script": cut_of("/ä/жук.flac", 0),
    "name that is no text": cut_of(os.fsdecode(b"/a/\xff.wav"), 0),
}


@pytest.fixture
def others(tmp_path, write_tone):
    """Cuts whose audio only lhotse can read, or whose channels no column holds."""
    path = write_tone(tmp_path / "a.wav", 0.5, channels=3)
    recording = Recording.from_file(path, recording_id="r")
    plain = recording.to_cut()
    return {
        "odd channels": MultiCut("odd", 0.0, 0.5, [0, 2], recording=recording),
        "transform": plain.with_id("louder").perturb_volume(2.0),
        "speed": plain.with_id(os.fsdecode(b"caf\xe9")).perturb_speed(1.1),
    }


def test_a_row_of_numbers_is_the_segment_of_the_cut():
    builder, second = AudioColumnsBuilder(), AudioColumnsBuilder()
    for number, cut in enumerate(CUTS.values()):
        (builder if number < 3 else second).append(cut)
    builder.extend(second)
    columns = builder.build()
    assert not len(columns.cuts.values)
    for row, cut in enumerate(CUTS.values()):
        assert columns[row] == AudioSegment.of(cut)
        assert columns.name(row) == cut.id
        assert audio_of(columns[row]) == audio_of(cut)
        assert audio_path(columns[row]) == audio_path(cut)


def test_other_cuts_are_kept_as_cuts(others):
    builder = AudioColumnsBuilder()
    builder.append(CUTS["mono"])
    for cut in others.values():
        builder.append(cut)
    columns = builder.build()
    assert columns[0] == AudioSegment.of(CUTS["mono"])
    for row, cut in enumerate(others.values(), 1):
        selected = columns[row]
        assert isinstance(selected, Cut)
        assert columns.name(row) == selected.id == cut.id
        assert audio_of(selected) == audio_of(cut)
        assert np.array_equal(load_audio(selected), load_audio(cut))


def test_ragged_arrays():
    rows = [[3, 1], [], [-4, 2**31 - 1, 7]]
    first, second = RaggedBuilder("i"), RaggedBuilder("i")
    first.append(rows[0])
    for row in rows[1:]:
        second.append(row)
    first.extend(second)
    assert len(first) == 3
    built = first.build()
    assert [built[index].tolist() for index in range(3)] == rows
    assert built.lengths.tolist() == [2, 0, 3]
    assert built.values.dtype == np.int32
    for order in ([0, 1, 2], [2, 0], [1]):
        expected = [value for index in order for value in rows[index]]
        assert np.concatenate([*built.blocks(np.array(order))]).tolist() == expected
    assert RaggedBuilder().build().lengths.tolist() == []
