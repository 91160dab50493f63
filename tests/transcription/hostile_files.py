"""Files that nobody should feed to a recogniser, and that somebody will."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000
GOOD, BAD, EITHER = "good", "bad", "either"

FORMATS = {
    "wav": ("WAV", "PCM_16"), "wav-u8": ("WAV", "PCM_U8"), "wav-24": ("WAV", "PCM_24"),
    "wav-32": ("WAV", "PCM_32"), "wav-float": ("WAV", "FLOAT"), "wav-double": ("WAV", "DOUBLE"),
    "wav-ulaw": ("WAV", "ULAW"), "wav-adpcm": ("WAV", "IMA_ADPCM"), "wav-gsm": ("WAV", "GSM610"),
    "flac": ("FLAC", "PCM_16"), "flac-24": ("FLAC", "PCM_24"), "ogg": ("OGG", "VORBIS"),
    "mp3": ("MP3", "MPEG_LAYER_III"), "aiff": ("AIFF", "PCM_16"), "au": ("AU", "PCM_16"),
    "caf": ("CAF", "PCM_16"), "w64": ("W64", "PCM_16"), "rf64": ("RF64", "PCM_16"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A file, and whether it should be transcribed."""

    path: str
    fate: str


def make(folder: Path) -> dict[str, Case]:
    """Write all files; the keys say what is wrong with them."""
    cases: dict[str, Case] = {}
    for part in (_sound, _samples, _damaged, _no_audio):
        for name, fate, content in part():
            path = folder / f"{name.replace(' ', '-')}.wav"
            path.write_bytes(content)
            cases[name] = Case(str(path), fate)
    for name, fate, path in (*_file_names(folder), *_no_files(folder)):
        cases[name] = Case(path, fate)
    return cases


def noise(samples: int = 4000, channels: int = 1, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.uniform(-0.5, 0.5, (samples, channels)).astype(np.float32)


def encoded(audio: np.ndarray, kind: tuple[str, str] = FORMATS["wav"], rate: int = RATE) -> bytes:
    """The bytes of an audio file."""
    import io

    file = io.BytesIO()
    soundfile.write(file, audio, rate, format=kind[0], subtype=kind[1])
    return file.getvalue()


Content = Iterator[tuple[str, str, bytes]]


def _sound() -> Content:
    """Unusual, and right."""
    for name, kind in FORMATS.items():
        yield f"sound {name}", GOOD, encoded(noise(), kind, 44_100 if name == "mp3" else RATE)
    for rate in (4000, 8000, 11_025, 22_050, 44_100, 96_000, 192_000, 384_000):
        yield f"{rate} Hz", GOOD, encoded(noise(), rate=rate)
    for channels in (2, 8, 64):
        yield f"{channels} channels", GOOD, encoded(noise(channels=channels))
    yield "8 channels of FLAC", GOOD, encoded(noise(channels=8), FORMATS["flac"])


def _samples() -> Content:
    """Strange waveforms."""
    for count in (1, 2, 159, 1281):
        yield f"{count} samples", GOOD, encoded(noise(count))
    yield "no samples", BAD, encoded(noise(0))
    yield "1 sample too fast", BAD, encoded(noise(1), rate=192_000)
    yield "silence", GOOD, encoded(np.zeros(4000))
    yield "silence FLAC", GOOD, encoded(np.zeros(400_000), FORMATS["flac"])
    yield "clipping", GOOD, encoded(np.sign(noise()))
    yield "offset", GOOD, encoded(np.ones(4000))
    double = FORMATS["wav-double"]
    yield "integers as floats", GOOD, encoded(noise() * 2.0**15, double)
    yield "denormal", GOOD, encoded(noise() * 1e-40, double)
    for name, value in {"NaN": np.nan, "infinite": np.inf, "huge": 1e30, "beyond": -1e300}.items():
        for place in (0, 3999):
            samples = noise().astype(np.float64)
            samples[place] = value
            yield f"{name} sample {place}", BAD, encoded(samples, double)


def _damaged() -> Content:
    """Broken on the way."""
    for name in ("wav", "flac", "ogg", "mp3", "caf"):
        content = encoded(noise(20_000), FORMATS[name], 44_100 if name == "mp3" else RATE)
        for share in (0.02, 0.5, 0.95):
            fate = BAD if name == "wav" and share < 0.9 else EITHER
            yield f"{name} cut at {share}", fate, content[: int(share * len(content))]
        middle = len(content) // 2
        zeros = content[:middle] + bytes(500) + content[middle + 500 :]
        yield f"{name} with zeros in the middle", GOOD if name == "wav" else EITHER, zeros
        draw = np.random.default_rng(len(content))
        flipped = bytearray(content)
        for position in draw.integers(0, min(200, len(content)), 20):
            flipped[position] ^= int(draw.integers(1, 256))
        yield f"{name} with another head", EITHER, bytes(flipped)
        yield f"{name} twice", EITHER, content + content
    flac = encoded(noise(20_000), FORMATS["flac"])
    yield "FLAC cut short", BAD, flac[: len(flac) // 2]


def _no_audio() -> Content:
    for name, content in {
        "empty": b"",
        "1 byte": b"R",
        "RIFF alone": b"RIFF",
        "RIFF and WAVE": b"RIFF\x24\0\0\0WAVE",
        "fLaC alone": b"fLaC",
        "text": b"no audio, but a poem\n" * 50,
        "JSON": b'{"audio_filepath": "x.wav"}\n' * 50,
        "a playlist": b"#EXTM3U\n#EXTINF:1,\nhttp://192.0.2.1/x.ts\nfile:///etc/passwd\n",
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(500),
        "a program": b"\x7fELF\x02\x01\x01" + bytes(500),
        "gzip": b"\x1f\x8b\x08" + bytes(500),
        "zeros": bytes(10_000),
        "ones": b"\xff" * 10_000,
    }.items():
        yield name, EITHER if name == "ones" else BAD, content


Path_ = Iterator[tuple[str, str, str]]


def _file_names(folder: Path) -> Path_:
    content = encoded(noise())
    names: dict[str, bytes] = {
        "spaces": b" a  b .wav",
        "line feed": b"a\nb.wav",
        "tab": b"a\tb.wav",
        "steering": b"\x1b[31mred\x07.wav",
        "no UTF-8": b"caf\xe9.wav",
        "emoji": "🎤.wav".encode(),
        "dash": b"-x.wav",
        "percent": b"%s%d%n.wav",
        "shell": b"$(touch x); `y` 'z' \"q\".wav",
        "pattern": b"[a]*?.wav",
        "protocol": b"concat:a|b.wav",
        "brackets as rich has them": b"[bold]x.wav",
        "dots": b"...wav",
        "no suffix": b"recording",
        "raw": b"x.raw",
        "long": b"x" * 251 + b".wav",
    }
    (folder / "names").mkdir()
    for name, file in names.items():
        path = os.path.join(folder, "names", os.fsdecode(file))
        Path(path).write_bytes(content)
        yield f"name: {name}", BAD if name == "raw" else GOOD, path


def _no_files(folder: Path) -> Path_:
    def place(name: str) -> str:
        return str(folder / name)

    yield "missing", BAD, place("missing.wav")
    yield "below a file", BAD, place("text.wav/x.wav")
    yield "too long a name", BAD, place("y" * 300)
    (folder / "folder.wav").mkdir()
    yield "a folder", BAD, place("folder.wav")
    os.mkfifo(folder / "fifo.wav")
    yield "a pipe", BAD, place("fifo.wav")
    yield "a device", BAD, "/dev/zero"
    with socket.socket(socket.AF_UNIX) as end:
        before = Path.cwd()
        os.chdir(folder)  # The path of a socket is at most 108 bytes long.
        end.bind("socket.wav")
        os.chdir(before)
    yield "a socket", BAD, place("socket.wav")
    (folder / "loop-a.wav").symlink_to("loop-b.wav")
    (folder / "loop-b.wav").symlink_to("loop-a.wav")
    yield "a loop", BAD, place("loop-a.wav")
    (folder / "dangling.wav").symlink_to("gone.wav")
    yield "a link to nothing", BAD, place("dangling.wav")
    (folder / "link.wav").symlink_to("silence.wav")
    yield "a link", GOOD, place("link.wav")
    if os.geteuid():
        (folder / "locked.wav").write_bytes(encoded(noise()))
        (folder / "locked.wav").chmod(0)
        yield "locked", BAD, place("locked.wav")
    yield "a pattern of nothing", BAD, place("nothing-*.wav")
