"""A small corpus for a real run: speech that was prepared elsewhere, or else tones.

Both are a folder with ``train.jsonl``, ``dev.jsonl``, ``audio/`` and ``tokenizer/``.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import wave
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from effasr.training.run_dir.run_directory import read_lines

SAMPLE_RATE = 16_000
TRAIN, DEV, TOKENIZER = "train.jsonl", "dev.jsonl", "tokenizer"
_VOCABULARY = 120
_WORDS = (
    *("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india"),
    *("juliett", "kilo", "lima", "mike", "november", "oscar", "papa", "quebec", "romeo"),
    *("sierra", "tango", "uniform", "victor", "whiskey", "xray", "yankee", "zulu"),
)
_LOWEST_HZ, _HIGHEST_HZ = 200.0, 3_500.0
_SHORTEST_WORD_S, _LONGEST_WORD_S = 0.25, 0.5
_MOST_WORDS = 16
_DEV_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk.

    Attributes:
        folder: Folder of its files.
        kind: ``speech`` or ``tones``.
        utterances: Lines of the training manifest.
        seconds: Seconds of their audio.
    """

    folder: Path
    kind: str
    utterances: int
    seconds: float

    @property
    def train(self) -> Path:
        """Manifest to train on."""
        return self.folder / TRAIN

    @property
    def dev(self) -> Path:
        """Manifest to validate on."""
        return self.folder / DEV

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.folder / TOKENIZER


def prepare(folder: Path, utterances: int = 80) -> Corpus:
    """Synthesise speech by the demo's generator, as FLAC of a few MB that may be copied elsewhere.

    Args:
        folder: New, or an earlier corpus, which is replaced.
        utterances: Utterances to train on; a tenth as many to validate on.

    Raises:
        ValueError: The synthesiser is not installed, or the folder holds something else.
    """
    import soundfile

    from effasr.data.demo.corpus import build

    _clear(folder)
    with tempfile.TemporaryDirectory() as temporary:
        built = build(Path(temporary) / "demo", utterances=utterances, jobs=1)
        for name, manifest in ((TRAIN, built.train), (DEV, built.dev)):
            lines = []
            for line in read_lines(manifest):
                source = built.root / line["audio_filepath"]
                audio, rate = soundfile.read(source, dtype="int16")
                path = Path("audio") / f"{source.stem}.flac"
                soundfile.write(folder / path, audio, rate)
                lines.append(line | {"audio_filepath": str(path)})
            _write(folder / name, lines)
    _write_tokenizer(folder)
    return _found(folder)


def find_or_make(prepared: Path | None, folder: Path, *, utterances: int) -> Corpus:
    """Return a copy of the prepared corpus with as many lines, or tones where there is none.

    Args:
        prepared: Folder that `prepare` wrote, or None.
        folder: New, or an earlier corpus, which is replaced.
        utterances: Lines of the training manifest; those of a smaller prepared corpus come again.
    """
    if prepared is None or not (prepared / TRAIN).is_file():
        return tones(folder, utterances)
    _clear(folder)
    lines = read_lines(prepared / TRAIN)
    repeated = [
        line | {"id": f"{line['id']}-{number // len(lines)}"}
        for number, line in zip(
            range(max(utterances, len(lines))), itertools.cycle(lines), strict=False
        )
    ]
    _write(folder / TRAIN, repeated)
    shutil.copy(prepared / DEV, folder / DEV)
    shutil.copytree(prepared / "audio", folder / "audio", dirs_exist_ok=True)
    shutil.copytree(prepared / TOKENIZER, folder / TOKENIZER)
    return _found(folder)


def tones(folder: Path, utterances: int) -> Corpus:
    """Return a corpus in which every word is a chord, in noise; the same bytes every time.

    It needs no synthesiser, and no package to write audio.

    Args:
        folder: New, or an earlier corpus, which is replaced.
        utterances: Utterances to train on; a tenth as many to validate on.
    """
    _clear(folder)
    rng = np.random.default_rng(0)
    for name, count in ((TRAIN, utterances), (DEV, max(2, round(_DEV_SHARE * utterances)))):
        lines = []
        for number in range(count):
            words = rng.choice(_WORDS, int(rng.integers(2, _MOST_WORDS))).tolist()
            audio = np.concatenate([_chord(word, rng) for word in words])
            path = Path("audio") / f"{Path(name).stem}-{number:05d}.wav"
            _write_wave(folder / path, audio)
            lines.append(
                {
                    "id": path.stem,
                    "audio_filepath": str(path),
                    "duration": len(audio) / SAMPLE_RATE,
                    "text": " ".join(words),
                    "lang": "en",
                }
            )
        _write(folder / name, lines)
    _write_tokenizer(folder)
    return _found(folder)


def _chord(word: str, rng: np.random.Generator) -> np.ndarray:
    seconds = rng.uniform(_SHORTEST_WORD_S, _LONGEST_WORD_S)
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    step = (_HIGHEST_HZ / _LOWEST_HZ) ** (1 / len(_WORDS))
    low = _LOWEST_HZ * step ** _WORDS.index(word)
    sound = np.sin(2 * np.pi * low * time) + 0.5 * np.sin(2 * np.pi * 1.7 * low * time)
    envelope = np.hanning(len(time))
    return 0.3 * sound * envelope + 0.01 * rng.standard_normal(len(time))


def _write_wave(path: Path, audio: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((audio.clip(-1, 1) * 32_767).astype("<i2").tobytes())


def _clear(folder: Path) -> None:
    """Remove an earlier corpus.

    Raises:
        ValueError: The folder holds something else.
    """
    ours = {TRAIN, DEV, TOKENIZER, "audio"}
    others = {path.name for path in folder.iterdir()} - ours if folder.exists() else set()
    if others:
        raise ValueError(
            f"`{folder}` must be new, empty or an earlier corpus, but holds "
            f"{', '.join(sorted(others)[:3])}: name another folder."
        )
    for name in ours:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "audio").mkdir(parents=True)


def _write_tokenizer(folder: Path) -> None:
    from effasr.data.tokenizer import train_tokenizer

    texts = [line["text"] for line in read_lines(folder / TRAIN)]
    train_tokenizer({"en": texts}, folder / TOKENIZER, vocab_size=_VOCABULARY)


def _found(folder: Path) -> Corpus:
    lines = read_lines(folder / TRAIN)
    kind = "tones" if lines[0]["audio_filepath"].endswith(".wav") else "speech"
    return Corpus(folder, kind, len(lines), sum(float(line["duration"]) for line in lines))


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
