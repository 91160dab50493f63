"""Calls with a speaker on each channel: one chosen, each on its own, and channels that cancel."""

import subprocess

import numpy as np
import pytest
import soundfile

from effasr.transcription.inputs.audio_stream import count_channels, open_stream
from effasr.transcription.inputs.sources import Source
from effasr.transcription.outputs.cues import cues
from effasr.transcription.outputs.subtitles import ctm, srt, vtt
from effasr.transcription.results import Failure, Segment, Transcription
from effasr.transcription.transcribe import render, transcribe
from tests.support.real_ffmpeg import real_ffmpeg

RATE = 16_000


@pytest.fixture
def call(tmp_path, noise):
    """A call whose speakers are at the same time, and each of them in a file."""
    speakers = [noise(6.0, seed=1), noise(6.0, seed=2), noise(6.0, seed=3)]
    for number, speaker in enumerate(speakers):
        soundfile.write(tmp_path / f"{number}.wav", speaker, RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "call.wav", np.stack(speakers, axis=1), RATE, subtype="FLOAT")
    return tmp_path


def source(path, **options) -> Source:
    return Source(str(path), path.stem, str(path), **options)


def test_channels_are_those_of_single_files(call, model, tokenizer) -> None:
    paths = [source(call / f"{number}.wav") for number in range(3)]
    single = list(transcribe(model, tokenizer, paths))
    texts = [result.text for result in single if isinstance(result, Transcription)]
    assert len(set(texts)) == 3
    twice = [source(call / "call.wav", per_channel=True)] * 2
    chosen = source(call / "call.wav", channel=1)
    whole, again, one = transcribe(model, tokenizer, [*twice, chosen])
    assert whole == again
    assert isinstance(whole, Transcription)
    assert isinstance(one, Transcription)
    assert (whole.id, whole.duration, whole.channels) == (twice[0].id, 6.0, (0, 1, 2))
    assert [whole.of_channel(channel).text for channel in range(3)] == texts
    starts = [segment.start for segment in whole.segments]
    assert starts == sorted(starts)
    assert one.text == texts[1]
    assert one.as_row()["segments"][0]["channel"] == 1
    assert [row["text"] for row in whole.as_row()["channels"]] == texts
    missing = transcribe(model, tokenizer, [source(call / "call.wav", channel=3)])
    (failure,) = missing
    assert isinstance(failure, Failure)
    assert failure.reason.endswith("channel 3 is wanted, but the file has 3.")


def test_every_format_has_the_channel() -> None:
    segments = (
        Segment(0.0, 3.0, "hello there", channel=0),
        Segment(1.0, 2.0, "hi", channel=1),
        Segment(3.5, 4.0, "bye", channel=0),
    )
    result = Transcription("a", 4.0, "hello there hi bye", segments, channels=(0, 1))
    assert render(result, "text") == "a\tchannel 0: hello there bye\na\tchannel 1: hi\n"
    assert [(cue.start, cue.channel) for cue in cues(result)] == [(0.0, 0), (1.0, 1), (3.5, 0)]
    assert "00:00:01.000 --> 00:00:02.000\n<v Channel 1>hi\n" in vtt(result)
    assert "2\n00:00:01,000 --> 00:00:02,000\nChannel 1: hi\n" in srt(result)
    rows = [line.split() for line in ctm(result).splitlines()]
    assert [(row[1], row[4]) for row in rows] == [
        ("1", "hello"),
        ("1", "there"),
        ("1", "bye"),
        ("2", "hi"),
    ]


def test_channels_in_antiphase_are_named(call, noise, effasr, saved) -> None:
    speaker = noise(4.0)
    path = call / "x.wav"
    soundfile.write(path, np.stack([speaker, -1.01 * speaker], axis=1), RATE, subtype="FLOAT")
    stream = open_stream(path, RATE)
    assert len(list(stream.blocks))
    assert stream.warning is not None
    assert "antiphase" in stream.warning
    assert "`--channel 1`" in stream.warning
    many = np.stack([noise(1.0, seed) for seed in range(64)], axis=1)
    soundfile.write(call / "many.wav", many, RATE, subtype="FLOAT")
    for file, channels in (("call.wav", None), ("many.wav", None), ("x.wav", [0])):
        stream = open_stream(call / file, RATE, channels=channels)
        assert len(list(stream.blocks))
        assert stream.warning is None
    done = effasr("transcribe", "--run", saved, "--json", path)
    assert done.code == 0
    assert f"{path}: the channels are in antiphase" in done.err
    assert "antiphase" in done.rows[0]["warning"]
    done = effasr("transcribe", "--run", saved, "--json", "--per-channel", path)
    assert "antiphase" not in done.err
    assert [row["channel"] for row in done.rows[0]["channels"]] == [0, 1]


@pytest.mark.parametrize("suffix", ["m4a", "mkv"])
def test_channels_by_ffmpeg(suffix, tmp_path, monkeypatch) -> None:
    program = real_ffmpeg()
    if program is None:
        pytest.skip("neither ffmpeg nor imageio-ffmpeg is installed")
    (tmp_path / "ffmpeg").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    times = np.arange(2 * RATE) / RATE
    sounds = [0.1 * np.sin(2 * np.pi * pitch * times) for pitch in (300, 500, 700, 900, 1100, 1300)]
    for count in (2, 6):
        soundfile.write("x.wav", np.stack(sounds[:count], axis=1), RATE)
        options = ["-c:a", "alac"] if suffix == "m4a" else ["-c:a", "flac"]
        command = ["ffmpeg", "-v", "error", "-y", "-i", "x.wav", *options, f"x.{suffix}"]
        subprocess.run(command, check=True, capture_output=True)
        assert count_channels(f"x.{suffix}") == count
        received = [
            np.concatenate(list(open_stream(f"x.{suffix}", RATE, channels=[channel]).blocks))
            for channel in range(count)
        ]
        expected = sorted(np.argmax(np.abs(np.fft.rfft(sound))) for sound in sounds[:count])
        # ALAC has another order of six channels.
        assert sorted(np.argmax(np.abs(np.fft.rfft(sound))) for sound in received) == expected
        with pytest.raises(
            ValueError, match=f"channel {count} is wanted, but the file has {count}"
        ):
            list(open_stream(f"x.{suffix}", RATE, channels=[count]).blocks)
