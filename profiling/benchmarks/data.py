"""How fast audio is read, by storage, workers and augmentation."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

from benchmarks import harness
from benchmarks.workload import LISTED, read_durations
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
from effasr.data.tokenizer import train_tokenizer

STORAGES = ("wav", "flac", "shar")
AUGMENTS = ("none", "speeds", "noise", "reverberation", "telephone", "all")
COLUMNS = (
    *("storage", "augment", "workers", "utterances", "audio_s", "utterances_per_s"),
    *("audio_s_per_s", "mb_per_s", "audio_s_per_core_s", "audio_s_per_cpu_s", "wait"),
    *("workers_rss_mb", "date"),
)
_NOISES = 200
_RATE = 16_000
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_corpus(folder: Path, hours: float, storage: str) -> Path:
    """Write noise at the durations of the list, 16 bits at 16 kHz; return its manifest."""
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
    """Return noise as loud and as dark as speech, in bursts: FLAC halves it, as it does speech."""
    white = rng.standard_normal(samples + 8).astype(np.float32)
    dark = np.convolve(white, np.full(8, 0.125, np.float32), "valid")[:samples]
    bursts = np.abs(np.sin(np.arange(samples, dtype=np.float32) * (np.pi * 3 / _RATE)))
    return 0.1 * dark * bursts


def _cut(name: str, path: Path, rng: np.random.Generator) -> MonoCut:
    recording = Recording.from_file(path, recording_id=name)
    words = max(1, round(2.5 * recording.duration))
    text = " ".join(_WORDS[index] for index in rng.integers(len(_WORDS), size=words))
    span: dict[str, Any] = {"id": name, "start": 0, "duration": recording.duration}
    supervision = SupervisionSegment(recording_id=name, text=text, language="en", **span)
    return MonoCut(channel=0, recording=recording, supervisions=[supervision], **span)


def write_noise(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    folder.mkdir()
    for number in range(_NOISES):
        audio = _noise(rng, int(rng.integers(5 * _RATE, 15 * _RATE)))
        soundfile.write(folder / f"{number}.wav", audio, _RATE, subtype="PCM_16")
    return folder


def augmented(name: str, noises: Path) -> dict[str, Any]:
    sections = {
        "noise": NoiseConfig(manifests=str(noises), probability=1.0),
        "reverberation": ReverberationConfig(simulated=True, probability=1.0),
        "telephone": TelephoneConfig(probability=1.0),
    }
    used = sections if name == "all" else {k: v for k, v in sections.items() if k == name}
    speeds = (0.9, 1.0, 1.1) if name in ("speeds", "all") else (1.0,)
    return {"speed_perturbation": speeds, "audio_augmentation": AudioAugmentationConfig(**used)}


class Epoch(NamedTuple):
    utterances: int
    audio_s: float
    seconds: float
    waited_s: float
    cpu_s: float


def load_epoch(loader: Loader, rate: float | None) -> Epoch:
    """Load an epoch, as a training that takes so many seconds of audio a second; None for any.

    The first step is left out: it waits for the processes to start, which a training does once.
    """
    utterances, audio, waited, began, used = 0, 0.0, 0.0, 0.0, 0.0
    with closing(loader.steps()) as steps:
        for count in range(max(2, loader.plan(0).num_steps)):
            requested = time.perf_counter()
            step = next(steps)
            received = time.perf_counter()
            if count == 0:
                began, used = received, time.process_time()
                continue
            waited += received - requested
            seconds = sum(batch.audio_seconds for batch in step.batches)
            audio += seconds
            utterances += sum(len(batch.ids) for batch in step.batches)
            if rate is not None:
                time.sleep(seconds / rate)
    cpu = time.process_time() - used
    return Epoch(utterances, audio, time.perf_counter() - began, waited, cpu)


def _loaded(manifest: Path, config: DataConfig) -> tuple[Corpus, int]:
    """Return the corpus, and the bytes of its audio files, of each speed of an utterance."""
    texts = {config.language: [" ".join(_WORDS)] * 20}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer(texts, Path(folder), vocab_size=32, model_type="bpe")
        corpus = Corpus.load([manifest], tokenizer, config, ctc=False)
    size = 0
    for index in range(len(corpus)):
        audio = corpus.audio(index)
        assert isinstance(audio, AudioSegment)
        path = audio.path
        size += path.size if isinstance(path, TarMember) else Path(path).stat().st_size
    return corpus, size


def loading(arguments: Sequence[str] | None = None) -> int:
    """Measures how fast audio is read: utterances, audio seconds and megabytes a second by storage.

        python profiling/bench.py loading [--hours 0.5] [--storage wav flac shar] [--workers 0 1 2]
            [--augment none speeds noise reverberation telephone all] [--repeats 3]
            [--manifest M] [--consume RATE] [--output ROWS.csv]

    Synthetic audio at the durations of a list of real ones is written to a temporary folder and
    loaded as training loads it, packed to static shapes, by different numbers of worker processes;
    with --manifest, your own data instead. ``wait`` is the share of the time that a training would
    wait for data which takes RATE seconds of audio a second (by default, 80 % of what the same
    workers reached). Files were just written, so disks and networks are not measured: decoding and
    packing are.

    With --augment, every utterance is changed in each of the named ways by itself: at the speeds
    0.9, 1 and 1.1; by noise of 5 to 15 s, of which there are 200 files; by a simulated room; by a
    telephone. ``audio_s_per_cpu_s`` is by the processor's time, for no workers: others that use the
    machine count less in it.
    """
    parser = harness.parser("loading", loading.__doc__)
    add = parser.add_argument
    add("--hours", type=float, default=0.5, help="of synthetic audio")
    add("--storage", nargs="+", choices=STORAGES, default=list(STORAGES))
    add("--workers", nargs="+", type=int, default=[0, 1, 2])
    add("--augment", nargs="+", choices=AUGMENTS, default=["none"])
    add("--repeats", type=int, default=1, help="the fastest epoch counts")
    add("--manifest", type=Path, help="load this instead of synthetic audio")
    add("--frame-budget", type=int, default=1000)
    add("--language", default="en")
    add("--consume", type=float, help="seconds of audio a second")
    options = parser.parse_args(arguments)
    config = DataConfig(frame_budget=options.frame_budget, language=options.language)
    visible = [name for name in COLUMNS if name not in ("utterances", "audio_s", "date")]
    harness.show("  ".join(f"{name:>13}" for name in visible))
    table = harness.Table(COLUMNS, options.output, harness.default_device())
    for storage in ["manifest"] if options.manifest else options.storage:
        with tempfile.TemporaryDirectory() as folder:
            manifest = options.manifest or write_corpus(Path(folder), options.hours, storage)
            noises = write_noise(Path(folder) / "noise") if options.augment != ["none"] else None
            for name in options.augment:
                changed = replace(config, **augmented(name, noises)) if noises else config
                corpus, size = _loaded(manifest, changed)
                for workers in options.workers:
                    loader = Loader(corpus, replace(changed, workers=workers), pin_memory=False)
                    row = {"storage": storage, "augment": name, "workers": workers}
                    row |= _measured(loader, workers, corpus, size, options)
                    table.add(row, "  ".join(f"{row[column]!s:>13}" for column in visible))
    return 0


def _measured(
    loader: Loader, workers: int, corpus: Corpus, size: int, options: Any
) -> dict[str, Any]:
    """Load an epoch as fast as it goes, then another at the rate of a training."""
    epochs = [load_epoch(loader, None) for _ in range(options.repeats)]
    fastest = min(epochs, key=lambda epoch: epoch.seconds)
    speed = fastest.audio_s / fastest.seconds
    trained = load_epoch(loader, options.consume or 0.8 * speed)
    read = size * fastest.audio_s / corpus.seconds
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    cpu_s = min(epoch.cpu_s for epoch in epochs)
    return {
        "utterances": fastest.utterances,
        "audio_s": round(fastest.audio_s, 1),
        "utterances_per_s": round(fastest.utterances / fastest.seconds, 1),
        "audio_s_per_s": round(speed, 1),
        "mb_per_s": round(read / fastest.seconds / 1e6, 2),
        "audio_s_per_core_s": round(speed / max(1, workers), 1),
        "audio_s_per_cpu_s": "" if workers else round(fastest.audio_s / cpu_s),
        "wait": round(trained.waited_s / trained.seconds, 4),
        "workers_rss_mb": round(children, 1) if workers else 0,
        "date": datetime.now(UTC).date().isoformat(),
    }
