"""With a program that behaves as ffmpeg does, and with ffmpeg itself."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.data.audio import ffmpeg
from effasr.data.audio.waveform import AudioError
from effasr.transcription.inputs.audio_stream import AudioStream, count_channels, open_stream
from effasr.transcription.inputs.sources import Source
from effasr.transcription.outputs.cues import cues
from effasr.transcription.outputs.subtitles import ctm, srt, vtt
from effasr.transcription.results import Failure, Segment, Transcription
from effasr.transcription.transcribe import Waveform, render, transcribe
from tests.support.real_ffmpeg import real_ffmpeg

RATE = 16_000
FAKE = """\
#!{python}
import json, os, sys, time
open({log!r}, "a").write(json.dumps(sys.argv[1:]) + "\\n")
assert not sys.stdin.read()
path = sys.argv[sys.argv.index("-i") + 1].removeprefix("file:")
content = open(path, "rb").read()
if content.startswith(b"slow"):
    open({log!r} + ".pid", "w").write(f"{{os.getpid()}} {{os.getpgrp()}}")
    time.sleep(60)
if content.startswith(b"playlist"):
    sys.exit("[hls @ 0x55] Format not on whitelist 'aac,mp3'\\nError opening")
if content.startswith(b"bad"):
    sys.exit("[in#0 @ 0x55] Invalid data\\nError opening")
sys.stdout.buffer.write(content[len(b"secret"):])
sys.exit(content.endswith(b"tail"))
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    """Puts a program named ffmpeg on the PATH; the file has the arguments of its calls."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ffmpeg"
    program.write_text(FAKE.format(python=sys.executable, log=str(tmp_path / "calls")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "calls"


def samples(stream: AudioStream) -> np.ndarray:
    return np.concatenate(list(stream.blocks))


def test_what_soundfile_cannot_read_comes_from_ffmpeg(calls, tmp_path, noise, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sound = noise(25.3)
    Path("-x y.m4a").write_bytes(b"secret" + sound.tobytes())
    stream = open_stream("-x y.m4a", RATE)
    assert stream.total is None
    assert np.array_equal(samples(stream), sound)
    samples(open_stream("-x y.m4a", RATE, offset=1.5, duration=0.25))
    samples(open_stream("-x y.m4a", RATE, offset=0.00005, duration=0.25))
    first, second, third = calls.read_text().splitlines()
    assert '"-nostdin"' in first
    assert '"file:-x y.m4a"' in first
    assert '"-protocol_whitelist", "file"' in first
    allowed = first.split('"-format_whitelist", "')[1].split('"')[0].split(",")
    assert {"mov", "matroska", "mp3"} <= set(allowed)
    assert not {"hls", "dash", "concat", "avisynth", "image2", "sdp", "vobsub"} & set(allowed)
    assert '"-ss"' not in first
    assert second.index('"-ss", "1.500000"') < second.index('"-i"')
    assert '"-t", "0.250000", "-ac", "1", "-ar", "16000"' in second
    assert '"-ss", "0.000050"' in third


def test_a_transcript_is_that_of_the_sound(calls, tmp_path, noise, model, tokenizer) -> None:
    sound = noise(40.0, seed=3)
    (tmp_path / "x.mp4").write_bytes(b"secret" + sound.tobytes())
    (tmp_path / "y.mp4").write_bytes(b"bad")
    sources = [tmp_path / "x.mp4", tmp_path / "y.mp4", Waveform("x", sound[: 20 * RATE], RATE)]
    whole, failed, half = transcribe(model, tokenizer, sources)
    assert isinstance(half, Transcription)
    assert whole.duration == 40.0
    assert len(whole.segments) == 2
    assert failed == Failure(str(sources[1]), f"{sources[1]}: ffmpeg: Invalid data")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"secret", "ffmpeg: no audio"),
        (b"secret" + np.full(9, np.nan, np.float32).tobytes(), "is NaN or infinite"),
        (b"playlist", "ffmpeg: not a format that has its audio in the file itself"),
    ],
)
def test_failures(calls, tmp_path, content, message) -> None:
    (tmp_path / "x.m4a").write_bytes(content)
    with pytest.raises(AudioError, match=message):
        samples(open_stream(tmp_path / "x.m4a", RATE))


def test_samples_before_a_failure_are_partial(calls, tmp_path) -> None:
    (tmp_path / "x.m4a").write_bytes(b"secret" + b"\0\0\0\0" * 10 + b"tail")
    stream = open_stream(tmp_path / "x.m4a", RATE)
    assert len(samples(stream)) == 11
    assert stream.partial == "ffmpeg: no audio (exit code 1)."


def test_more_than_a_file_can_hold_is_not_read(calls, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ffmpeg, "SAMPLES_PER_BYTE", 0)
    (tmp_path / "x.m4a").write_bytes(b"secret" + bytes(400))
    with pytest.raises(AudioError, match="more than 0 samples, which the file cannot hold"):
        samples(open_stream(tmp_path / "x.m4a", RATE))


def test_one_that_hangs_is_ended(calls, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ffmpeg, "PATIENCE_S", 1.0)
    (tmp_path / "x.m4a").write_bytes(b"slow")
    started = time.monotonic()
    with pytest.raises(AudioError, match="ffmpeg gave no audio for 1 s"):
        samples(open_stream(tmp_path / "x.m4a", RATE))
    assert time.monotonic() - started < 30
    process, group = map(int, (tmp_path / "calls.pid").read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert group != os.getpgrp(), "a terminal's Ctrl-C would end ffmpeg, too"


def test_without_ffmpeg_it_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.m4a").write_bytes(b"secret")
    with pytest.raises(AudioError, match=r"ffmpeg might read it, but is not on the PATH"):
        open_stream(tmp_path / "x.m4a", RATE)


GREEDY = """\
#!{python}
import resource, time
until = time.monotonic() + 60
while resource.getrlimit(resource.RLIMIT_AS)[0] != {limit} and time.monotonic() < until:
    time.sleep(0.01)
try:
    bytearray({limit})
except MemoryError:
    raise SystemExit("Cannot allocate memory") from None
"""


def test_what_takes_too_much_memory_is_ended(calls, tmp_path, monkeypatch) -> None:
    limit = 128 << 20
    monkeypatch.setattr(ffmpeg, "_MEMORY_BYTES", limit)
    program = GREEDY.format(python=sys.executable, limit=limit)
    (tmp_path / "bin" / "ffmpeg").write_text(program)
    (tmp_path / "x.m4a").write_bytes(b"secret")
    with pytest.raises(AudioError, match="ffmpeg: Cannot allocate memory"):
        samples(open_stream(tmp_path / "x.m4a", RATE))


@pytest.fixture
def real(monkeypatch, tmp_path) -> Path:
    """A working directory where the real ffmpeg is on the PATH."""
    program = real_ffmpeg()
    if program is None:
        pytest.skip("neither ffmpeg nor imageio-ffmpeg is installed")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ffmpeg").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sweep(seconds: float) -> np.ndarray:
    """A tone whose pitch rises: a part of it fits at its own place alone."""
    times = np.arange(int(seconds * RATE)) / RATE
    return 0.1 * np.sin(2 * np.pi * times * (100 + 60 * times))


def write(name: str, sound: np.ndarray) -> None:
    soundfile.write("sound.wav", np.stack([sound, sound], axis=1), RATE)
    command = ["ffmpeg", "-nostdin", "-v", "error", "-i", "sound.wav", f"file:{name}"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("name", ["x.m4a", "-x.mp4", "concat:a|b.mkv"])
def test_ffmpeg_itself(real, name) -> None:
    sound = sweep(5.0)
    write(name, sound)
    received = samples(open_stream(name, RATE))
    assert abs(len(received) - len(sound)) < 0.1 * RATE
    length = min(len(received), len(sound))
    assert np.corrcoef(received[:length], sound[:length])[0, 1] > 0.98
    part = samples(open_stream(name, RATE, offset=2.0, duration=1.0))
    assert len(part) == pytest.approx(RATE, abs=0.1 * RATE)


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{}\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("name", "text", "plain"),
    [
        ("x.m3u8", PLAYLIST, ("-allowed_extensions", "ALL", "-extension_picky", "0")),
        ("x.m4a", "ffconcat version 1.0\nfile {}\n", ("-safe", "0", "-f", "concat")),
    ],
)
def test_ffmpeg_itself_reads_no_other_file(real, name, text, plain) -> None:
    sound = sweep(1.0)
    write("other.mp4", sound)
    Path(name).write_text(text.format(Path("other.mp4").absolute()))
    # Asked to, ffmpeg reads the other file.
    command = ["ffmpeg", "-v", "error", *plain, "-i", name, "-f", "f32le", "-ac", "1", "-"]
    received = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(received) // 4 == pytest.approx(len(sound), abs=0.1 * RATE)
    with pytest.raises(AudioError, match="not a format that has its audio in the file itself"):
        samples(open_stream(name, RATE))


def test_ffmpeg_itself_knows_each_format(real) -> None:
    """A name that it does not know would have no effect."""
    listed = subprocess.run(
        ["ffmpeg", "-v", "error", "-demuxers"], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split() for line in listed.splitlines() if line.startswith(" D")]
    existing = {name for row in rows for name in row[1].split(",")}
    assert set(ffmpeg._FORMATS) <= existing
    assert {"hls", "dash", "concat"} <= existing


DELAY = 6.0


def write_delayed(name: str, sound: np.ndarray, *options: str) -> None:
    """Write a video of 9 s whose sound begins late and has a hole of a second."""
    soundfile.write("sound.wav", sound, RATE)
    late = f"asetpts=PTS+{DELAY}/TB+gt(T\\,1)/TB"
    command = [
        *("ffmpeg", "-nostdin", "-v", "error", "-i", "sound.wav", "-f", "lavfi"),
        *("-i", "testsrc=size=64x64:duration=9:rate=25", "-map", "1:v", "-map", "0:a"),
        *("-af", f"asetnsamples=1600,{late}", *options, name),
    ]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.mkv", ("-c:a", "flac")),
        ("x.mp4", ("-c:a", "aac")),
        ("x.webm", ("-c:a", "libopus", "-c:v", "libvpx")),
        ("x.ts", ("-c:a", "mp2")),
        ("x.mpg", ("-c:a", "mp2")),
    ],
)
def test_time_is_that_of_the_container(real, name, options) -> None:
    sound = sweep(2.0)
    write_delayed(name, sound, *options)
    received = samples(open_stream(name, RATE))
    assert not np.abs(received[: int((DELAY - 0.1) * RATE)]).max()
    begin = int(DELAY * RATE)
    margin = RATE // 20
    first = received[begin + margin : begin + RATE // 2]
    lags = [np.corrcoef(first, sound[lag : lag + len(first)])[0, 1] for lag in range(2 * margin)]
    assert max(lags) > 0.95, "the beginning is within 50 ms of its place"
    assert np.abs(received[begin + RATE + 3200 : begin + 2 * RATE - 3200]).max() < 0.01
    assert np.abs(received[begin + 2 * RATE + 3200 : begin + 3 * RATE - 6400]).max() > 0.09
    part = samples(open_stream(name, RATE, offset=2.0, duration=3.0))
    assert len(part) == 3 * RATE
    assert not part.any()
    part = samples(open_stream(name, RATE, offset=5.0, duration=2.0))
    assert np.abs(part[: RATE - 1600]).max() < 0.01
    assert np.abs(part[RATE + 1600 :]).max() > 0.09


def test_a_stream_whose_rate_changes(real) -> None:
    content = b""
    for start, (rate, channels) in enumerate([(44_100, 1), (48_000, 2)]):
        source = f"sine=300:duration=2:sample_rate={rate}"
        output = ("-ac", str(channels), "-output_ts_offset", str(2 * start), "-c:a", "mp2")
        command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, *output, "x.ts", "-y"]
        subprocess.run(command, check=True, capture_output=True)
        content += Path("x.ts").read_bytes()
    Path("x.ts").write_bytes(content)
    assert len(samples(open_stream("x.ts", RATE))) == pytest.approx(4 * RATE, abs=0.1 * RATE)


def test_tracks_and_videos_without_sound(real) -> None:
    soundfile.write("a.wav", sweep(1.0), RATE)
    soundfile.write("b.wav", sweep(2.0), RATE)
    for name, inputs in {
        "two.mkv": ["-i", "a.wav", "-i", "b.wav", "-map", "0", "-map", "1"],
        "none.mp4": ["-f", "lavfi", "-i", "testsrc=size=64x64:duration=1:rate=25"],
    }.items():
        command = ["ffmpeg", "-v", "error", *inputs, name]
        subprocess.run(command, check=True, capture_output=True)
    for track, seconds in enumerate((1, 2)):
        received = samples(open_stream("two.mkv", RATE, track=track))
        assert len(received) == pytest.approx(seconds * RATE, abs=0.05 * RATE)
    with pytest.raises(
        AudioError, match=r"two\.mkv: ffmpeg: no audio track 2: tracks count from 0"
    ):
        samples(open_stream("two.mkv", RATE, track=2))
    with pytest.raises(AudioError, match=r"none\.mp4: ffmpeg: no audio track"):
        samples(open_stream("none.mp4", RATE))
    with pytest.raises(AudioError, match=r"a\.wav: ffmpeg: no audio track 1"):
        samples(open_stream("a.wav", RATE, track=1))


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
    assert (whole.id, whole.duration, whole.channels) == (twice[0].id, 6.0, (0, 1, 2))
    assert [whole.of_channel(channel).text for channel in range(3)] == texts
    starts = [segment.start for segment in whole.segments]
    assert starts == sorted(starts)
    assert one.text == texts[1]
    assert one.as_row()["segments"][0]["channel"] == 1
    assert [row["text"] for row in whole.as_row()["channels"]] == texts
    (failure,) = transcribe(model, tokenizer, [source(call / "call.wav", channel=3)])
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
def test_channels_by_ffmpeg(suffix, real) -> None:
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
