"""Measures how fast audio is read: utterances, audio seconds and megabytes a second by storage.

    python profiling/data/bench_loading.py [--hours 0.5] [--storage wav flac shar] [--workers 0 1 2]
        [--augment none speeds noise reverberation telephone all] [--repeats 3]
        [--manifest M] [--consume RATE] [--output ROWS.csv]

Synthetic audio at the durations of a list of real ones is written to a temporary folder and loaded
as training loads it, packed to static shapes, by different numbers of worker processes; with
--manifest, your own data instead. ``wait`` is the share of the time that a training would wait for
data which takes RATE seconds of audio a second (by default, 80 % of what the same workers reached).
Files were just written, so disks and networks are not measured: decoding and packing are.

With --augment, every utterance is changed in each of the named ways by itself: at the speeds 0.9, 1
and 1.1; by noise of 5 to 15 s, of which there are 200 files; by a simulated room; by a telephone.
``audio_s_per_cpu_s`` is by the processor's time, for no workers: others that use the machine count
less in it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows as csv_rows
from bench.workload import LISTED, read_durations

from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.data.audio.waveform import AudioSegment, TarMember
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.tokenizer.training import train_tokenizer

STORAGES = ("wav", "flac", "shar")
AUGMENTS = ("none", "speeds", "noise", "reverberation", "telephone", "all")
_NOISES = 200
COLUMNS = (
    "storage",
    "augment",
    "workers",
    "utterances",
    "audio_s",
    "utterances_per_s",
    "audio_s_per_s",
    "mb_per_s",
    "audio_s_per_core_s",
    "audio_s_per_cpu_s",
    "wait",
    "workers_rss_mb",
    "date",
)
_RATE = 16_000
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_corpus(folder: Path, hours: float, storage: str) -> Path:
    """Write noise at the durations of the list, 16 bits at 16 kHz; return its manifest.

    Raises:
        ValueError: The kind of storage is unknown.
    """
    if storage not in STORAGES:
        raise ValueError(
            f"`storage` must be one of {', '.join(STORAGES)}, but is {storage!r}: "
            "use --manifest for data of your own."
        )
    rng = np.random.default_rng(0)
    durations = read_durations(LISTED)
    suffix = "wav" if storage == "wav" else "flac"
    cuts, written = [], 0.0
    while written < 3600 * hours:
        name = f"{len(cuts):06d}"
        seconds = float(durations[int(rng.integers(len(durations)))])
        path = folder / f"{name}.{suffix}"
        soundfile.write(path, _noise(rng, round(seconds * _RATE)), _RATE, subtype="PCM_16")
        cuts.append(_cut(name, path, rng))
        written += seconds
    manifest = folder / "cuts.jsonl"
    CutSet.from_cuts(cuts).to_file(manifest)
    if storage != "shar":
        return manifest
    shards = folder / "shards"
    shards.mkdir()
    CutSet.from_cuts(cuts).to_shar(str(shards), fields={"recording": "flac"}, shard_size=1000)
    return shards


def _noise(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Noise as loud and as dark as speech, in bursts: FLAC halves it, as it does speech."""
    white = rng.standard_normal(samples + 8).astype(np.float32)
    dark = np.convolve(white, np.full(8, 0.125, np.float32), "valid")[:samples]
    bursts = np.abs(np.sin(np.arange(samples, dtype=np.float32) * (np.pi * 3 / _RATE)))
    return 0.1 * dark * bursts


def _cut(name: str, path: Path, rng: np.random.Generator) -> MonoCut:
    recording = Recording.from_file(path, recording_id=name)
    words = max(1, round(2.5 * recording.duration))
    text = " ".join(_WORDS[index] for index in rng.integers(len(_WORDS), size=words))
    supervision = SupervisionSegment(
        id=name,
        recording_id=name,
        start=0,
        duration=recording.duration,
        text=text,
        language="en",
    )
    return MonoCut(
        id=name,
        start=0,
        duration=recording.duration,
        channel=0,
        recording=recording,
        supervisions=[supervision],
    )


def stored_bytes(corpus: Corpus) -> int:
    """Size of the audio files, as they are stored; of utterances at several speeds, of each."""
    total = 0
    for index in range(len(corpus)):
        audio = corpus.audio(index)
        assert isinstance(audio, AudioSegment)
        path = audio.path
        total += path.size if isinstance(path, TarMember) else Path(path).stat().st_size
    return total


def write_noise(folder: Path) -> Path:
    """Write recordings of noise; return their folder."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number in range(_NOISES):
        audio = _noise(rng, int(rng.integers(5 * _RATE, 15 * _RATE)))
        soundfile.write(folder / f"{number}.wav", audio, _RATE, subtype="PCM_16")
    return folder


def augmented(name: str, noises: Path) -> dict[str, Any]:
    """Return the fields of `DataConfig` for a way to change audio, of every utterance."""
    sections = {
        "noise": NoiseConfig(manifests=str(noises), probability=1.0),
        "reverberation": ReverberationConfig(simulated=True, probability=1.0),
        "telephone": TelephoneConfig(probability=1.0),
    }
    used = sections if name == "all" else {k: v for k, v in sections.items() if k == name}
    speeds = (0.9, 1.0, 1.1) if name in ("speeds", "all") else (1.0,)
    return {"speed_perturbation": speeds, "audio_augmentation": AudioAugmentationConfig(**used)}


def measure(
    corpus: Corpus, config: DataConfig, consume: float | None, repeats: int = 1
) -> dict[str, float]:
    """Load an epoch as fast as it goes, then another at the rate of a training.

    Args:
        corpus: Corpus to load.
        config: Loader configuration, with the number of workers.
        consume: Seconds of audio a second that the training takes; None for 80 % of the fastest.
        repeats: Number of times that the first is loaded; the fastest counts.

    Returns:
        Utterances, seconds of audio, seconds that loading took, those of the processor in this
        process, and the share of waiting.
    """
    loader = Loader(corpus, config, pin_memory=False)
    epochs = [_epoch(loader, None) for _ in range(repeats)]
    utterances, audio, seconds = min(epochs, key=lambda epoch: epoch[2])[:3]
    rate = consume or 0.8 * audio / seconds
    _, _, elapsed, waited, _ = _epoch(loader, rate)
    return {
        "utterances": utterances,
        "audio_s": audio,
        "seconds": seconds,
        "cpu_seconds": min(epoch[4] for epoch in epochs),
        "wait": waited / elapsed,
    }


def _epoch(loader: Loader, rate: float | None) -> tuple[int, float, float, float, float]:
    """Return utterances, audio seconds, and the seconds taken, waited and of processor time.

    The first step is left out: it waits for the processes to start, which a training does once.
    """
    utterances, audio, waited, began, used = 0, 0.0, 0.0, 0.0, 0.0
    with closing(loader.steps()) as steps:
        for count in range(max(2, loader.plan(0).num_steps)):
            asked = time.perf_counter()
            step = next(steps)
            got = time.perf_counter()
            if count == 0:
                began, used = got, time.process_time()
                continue
            waited += got - asked
            seconds = sum(batch.audio_seconds for batch in step.batches)
            audio += seconds
            utterances += sum(len(batch.ids) for batch in step.batches)
            if rate is not None:
                time.sleep(seconds / rate)
    return utterances, audio, time.perf_counter() - began, waited, time.process_time() - used


def rows_of(
    storage: str,
    manifest: Path,
    config: DataConfig,
    workers: Sequence[int],
    consume: float | None,
    augment: str = "none",
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Return a row for each number of workers."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(
            {config.language: [" ".join(_WORDS)] * 20},
            Path(folder),
            vocab_size=32,
            model_type="bpe",
        )
        corpus = Corpus.load([manifest], tokenizer, config, ctc=False)
    size = stored_bytes(corpus)
    for count in workers:
        seen = measure(corpus, replace(config, workers=count), consume, repeats)
        share = seen["audio_s"] / corpus.seconds
        speed = seen["audio_s"] / seen["seconds"]
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        rows.append(
            {
                "storage": storage,
                "augment": augment,
                "workers": count,
                "utterances": seen["utterances"],
                "audio_s": round(seen["audio_s"], 1),
                "utterances_per_s": round(seen["utterances"] / seen["seconds"], 1),
                "audio_s_per_s": round(speed, 1),
                "mb_per_s": round(size * share / seen["seconds"] / 1e6, 2),
                "audio_s_per_core_s": round(speed / max(1, count), 1),
                "audio_s_per_cpu_s": "" if count else round(seen["audio_s"] / seen["cpu_seconds"]),
                "wait": round(seen["wait"], 4),
                "workers_rss_mb": round(children, 1) if count else 0,
                "date": datetime.now(UTC).date().isoformat(),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    titles = {
        "storage": "storage",
        "augment": "augment",
        "workers": "workers",
        "utterances_per_s": "utterances/s",
        "audio_s_per_s": "audio s/s",
        "audio_s_per_core_s": "audio s/s a worker",
        "audio_s_per_cpu_s": "audio s/CPU s",
        "mb_per_s": "MB/s",
        "wait": "wait",
        "workers_rss_mb": "largest worker, MB",
    }
    lines = [list(titles.values())]
    for row in rows:
        cells = dict(row) | {"wait": f"{100 * row['wait']:.1f} %"}
        lines.append([str(cells[name]) for name in titles])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=0.5, help="of synthetic audio")
    parser.add_argument("--storage", nargs="+", choices=STORAGES, default=list(STORAGES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--augment", nargs="+", choices=AUGMENTS, default=["none"])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest epoch counts")
    parser.add_argument("--manifest", type=Path, help="load this instead of synthetic audio")
    parser.add_argument("--frame-budget", type=int, default=1000)
    parser.add_argument("--language", default="en")
    parser.add_argument("--consume", type=float, help="seconds of audio a second")
    parser.add_argument("--output", type=Path, help="CSV to append to")
    options = parser.parse_args(arguments)
    config = DataConfig(frame_budget=options.frame_budget, language=options.language)
    rows = []
    storages = ["manifest"] if options.manifest else options.storage
    for storage in storages:
        with tempfile.TemporaryDirectory() as folder:
            manifest = options.manifest or write_corpus(Path(folder), options.hours, storage)
            noises = write_noise(Path(folder) / "noise") if options.augment != ["none"] else None
            for name in options.augment:
                changed = replace(config, **augmented(name, noises)) if noises else config
                rows += rows_of(
                    storage, manifest, changed, options.workers, options.consume, name,
                    options.repeats,
                )  # fmt: skip
    sys.stdout.write(show(rows) + "\n")
    if options.output is not None:
        for row in rows:
            csv_rows.append(options.output, COLUMNS, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
