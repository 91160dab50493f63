"""Benchmarks of data: reading audio, planning an epoch, and the start of a training."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import random
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
from benchmarks.workload import (
    FRAMES_PER_SECOND,
    LISTED,
    TOKENS_PER_SECOND,
    read_durations,
)
from effasr.data.audio.augmentation.config import (
    AudioAugmentationConfig,
    NoiseConfig,
    ReverberationConfig,
    TelephoneConfig,
)
from effasr.data.audio.waveform import AudioSegment, TarMember
from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.index.corpus_cache import CorpusCache
from effasr.data.loader import Loader
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.data.sampling.packing import imbalance, plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.tokenizer import load_tokenizer, train_tokenizer

# --- reading audio --------------------------------------------------------------------------------

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
    """Write recordings of noise of 5 to 15 s; return their folder."""
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


# --- planning an epoch ----------------------------------------------------------------------------

PROMPT = 8


class Planned(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_bytes: int  # of the process
    steps: int
    padding_frames: float  # share of frame rows
    padding_tokens: float
    # Excess of the slowest rank's predicted work over the mean, over steps.
    imbalance_mean: float
    imbalance_p99: float
    imbalance_max: float


def draw_lengths(count: int, seed: int = 0) -> UtteranceLengths:
    """Return random lengths, log-normal as those of speech corpora."""
    rng = np.random.default_rng(seed)
    seconds = np.clip(np.exp(rng.normal(np.log(5.5), 0.75, count)), 0.3, 40)
    tokens = TOKENS_PER_SECOND * seconds * np.exp(rng.normal(0, 0.25, count))
    return UtteranceLengths(
        np.ceil(seconds * FRAMES_PER_SECOND).astype(np.int32),
        (PROMPT + np.maximum(1, np.round(tokens))).astype(np.int32),
    )


def plan(count: int, frame_budget: int, world_size: int, epoch: int = 1) -> Planned:
    """Plan an epoch in this process; not the first, for one utterance is carried into it."""
    lengths = draw_lengths(count)
    token_budget = suggest_token_budget(lengths, frame_budget)
    shape = StaticShape(frame_budget, token_budget, max(8, frame_budget // 8))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    made = plan_epoch(lengths, shape=shape, micro_batches=world_size, seed=0, epoch=epoch)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cost = CANARY_180M_FLASH.of(lengths.frames, lengths.tokens)[made.indices]
    ends = np.append(0, np.cumsum(cost))
    excess = imbalance(np.diff(ends[made.offsets]), world_size, world_size)
    spread = float(excess.mean()), float(np.quantile(excess, 0.99)), float(excess.max())
    padding = made.padding_frames, made.padding_tokens
    return Planned(seconds, cpu_seconds, peak, made.num_steps, *padding, *spread)


def planning(arguments: Sequence[str] | None = None) -> int:
    """Time, memory, padding and imbalance of planning an epoch.

        python profiling/bench.py planning [--utterances 1e7] [--frame-budgets 8000 24000]

    Lengths are drawn at random: 0.3 to 40 s, log-normal with a median of 5.5 s, about 3.6 tokens a
    second. Each plan is made in a process of its own, by one thread; memory is the most that this
    process ever had, with Python, torch and the lengths.
    """
    parser = harness.parser("planning", planning.__doc__)
    add = parser.add_argument
    add("--utterances", nargs="+", type=float, default=[1e6])
    add("--frame-budgets", nargs="+", type=int, default=[8_000, 24_000])
    add("--world-sizes", nargs="+", type=int, default=[8])
    options = parser.parse_args(arguments)
    columns = ("utterances", "frame_budget", "ranks", *Planned._fields)
    head = ("utterances", "frame budget", "ranks", "steps", "wall s", "CPU s", "peak GB")
    head += ("padding of frames", "of tokens", "imbalance mean", "p99", "max")
    harness.show(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    table = harness.Table(columns, options.output, harness.default_device())
    # A forked process would begin with this one's memory.
    context = multiprocessing.get_context("spawn")
    sizes = [(b, w) for b in options.frame_budgets for w in options.world_sizes]
    for count in map(int, options.utterances):
        for budget, ranks in sizes:
            with context.Pool(1) as pool:
                made = pool.apply(plan, (count, budget, ranks))
            cells = [f"{x:,}" for x in (count, budget)] + [str(ranks), f"{made.steps:,}"]
            cells += [f"{made.seconds:.1f}", f"{made.cpu_seconds:.1f}"]
            cells += [f"{made.peak_bytes / 1e9:.2f}", *(f"{share:.3%}" for share in made[4:])]
            row = {"utterances": count, "frame_budget": budget, "ranks": ranks}
            table.add(row | made._asdict(), f"| {' | '.join(cells)} |")
    return 0


# --- the start of a training ----------------------------------------------------------------------

_WORDS_PER_SECOND = 2.2
_LOOKS = 20_000
_LINE = (
    '{{"id": "{name}", "start": 0.0, "duration": {seconds}, "channel": 0, "supervisions": '
    '[{{"id": "{name}", "recording_id": "{name}", "start": 0.0, "duration": {seconds}, '
    '"channel": 0, "text": "{text}", "language": "en"}}], "recording": {{"id": "{name}", '
    '"sources": [{{"type": "file", "channels": [0], "source": "/data/audio/{folder}/{name}.flac"}}'
    '], "sampling_rate": 16000, "num_samples": {samples}, "duration": {seconds}, '
    '"channel_ids": [0]}}, "custom": {{"target_lang": "en", "task": "transcribe", "pnc": true}}, '
    '"type": "MonoCut"}}\n'
)


class Started(NamedTuple):
    """What a process took until it had its corpus; memory in bytes."""

    seconds: float
    cpu_seconds: float  # with those of processes that read for it
    before: int  # private, at the beginning
    private: int  # with the corpus
    peak: int  # with shared memory
    mapped: int  # of files, which processes share
    fingerprint: str


def write_manifest(path: Path, count: int) -> list[str]:
    """Write a manifest; return some of its texts."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfghklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
    pool = rng.choices(words, k=100_000)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for index, number in enumerate(draw_lengths(count).frames.tolist()):
            begin = index * 7_919 % 99_000
            seconds = number * 0.08
            line = _LINE.format(
                name=f"speaker{index % 9_973:05}-chapter{index % 131:03}-{index:09}",
                seconds=round(seconds, 2),
                samples=number * 1_280,
                folder=f"{index % 100:02}",
                text=" ".join(pool[begin : begin + max(1, round(seconds * _WORDS_PER_SECOND))]),
            )
            file.write(line.encode())
    return [" ".join(pool[begin : begin + 12]) for begin in range(0, 24_000, 12)]


def _start(
    folder: Path, jobs: int, keep: bool, with_worker: bool, ready: Any, results: Any
) -> None:
    """Run one rank: get the corpus as training does; with a worker, that one's result counts."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    before = _memory()["RssAnon"]
    note = lambda text: harness.complain(text)
    cache = CorpusCache(folder / "cache" if keep else None, note, jobs=jobs)
    ready.wait()
    begin, cpu_begin = time.perf_counter(), sum(os.times()[:4])
    manifest = folder / "cuts.jsonl.gz"
    corpus = Corpus.load([manifest], tokenizer, DataConfig(), ctc=False, read=cache)
    times = time.perf_counter() - begin, sum(os.times()[:4]) - cpu_begin
    if with_worker:
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=_look, args=(corpus, results))
        process.start()
        process.join()
        return
    now = _memory()
    sizes = before, now["RssAnon"], now["VmHWM"], now["RssFile"]
    results.put(Started(*times, *sizes, corpus.fingerprint))


def _look(corpus: Corpus, results: Any) -> None:
    """Look at random utterances, in a worker that is forked as for loading."""
    before, begin, cpu_begin = _private(), time.perf_counter(), time.process_time()
    for index in np.random.default_rng(0).integers(len(corpus), size=_LOOKS).tolist():
        corpus.audio(index)
        corpus._tokens[corpus._rows[index]].tolist()
    times = time.perf_counter() - begin, time.process_time() - cpu_begin
    private, now = _private(), _memory()
    results.put(Started(*times, before, private, now["VmHWM"], now["RssFile"], ""))


def _memory() -> dict[str, int]:
    """Return bytes, by the names of Linux's /proc/PID/status."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


def _private() -> int:
    """Return bytes that are no other process's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


def _run(ranks: int, *arguments: Any) -> list[Started]:
    # A forked process would begin with this one's memory.
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=_start, args=(*arguments, ready, results)) for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    started = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return started


def corpus(arguments: Sequence[str] | None = None) -> int:
    """Time and memory of a start with millions of utterances.

        python profiling/bench.py corpus [--utterances 1e6] [--jobs 2] [--ranks 2] [--folder F]

    A manifest of lhotse cuts is written (audio is not needed), with durations as in `bench.py
    planning` and random words, and a tokenizer of 1,000 pieces is trained on some of it. Then, each
    in processes of their own:

    - plain: one process reads the manifest, and nothing is kept;
    - cold: the ranks start together, and nothing is kept yet: one of them reads, the others wait;
    - warm: they start together again;
    - worker: a process that is forked from a warm one looks at 20,000 random utterances.

    Seconds are of the slowest process, from the call to the corpus and the plan's lengths; memory
    is that of the largest: what is its own, and what it maps and shares with the others. The
    baseline of Python with its packages is visible as well. The page cache is warm.
    """
    parser = harness.parser("corpus", corpus.__doc__)
    add = parser.add_argument
    add("--utterances", nargs="+", type=float, default=[1e6])
    add("--jobs", type=int, help="processes that read (default: as training)")
    add("--ranks", type=int, default=2)
    add("--folder", type=Path, help="for manifest and corpus, about 1 kB a line")
    add("--skip-plain", action="store_true", help="do not measure the plain start")
    options = parser.parse_args(arguments)
    head = ("start", "utterances", "processes", "s", "CPU s of all")
    head += ("GB before", "GB own", "GB mapped", "GB peak")
    harness.show(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    columns = ("start", "utterances", "processes", *Started._fields)
    table = harness.Table(columns, options.output, harness.default_device())
    kinds = {"plain": (1, False), "cold": (options.ranks, True), "warm": (options.ranks, True)}
    kinds[f"worker, {_LOOKS:,} looks"] = (1, True)
    for count in map(int, options.utterances):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            texts = write_manifest(folder / "cuts.jsonl.gz", count)
            train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=1_000, model_type="bpe")
            fingerprints: set[str] = set()
            for kind, (ranks, keep) in kinds.items():
                if kind == "plain" and options.skip_plain:
                    continue
                started = _run(ranks, folder, options.jobs, keep, kind.startswith("worker"))
                fingerprints |= {result.fingerprint for result in started} - {""}
                worst = Started(*(max(values) for values in zip(*started, strict=True)))
                worst = worst._replace(cpu_seconds=sum(result.cpu_seconds for result in started))
                cells = [kind, f"{count:,}", str(ranks)]
                cells += [f"{worst.seconds:.1f}", f"{worst.cpu_seconds:.1f}"]
                sizes = (worst.before, worst.private, worst.mapped, worst.peak)
                cells += [f"{size / 1e9:.2f}" for size in sizes]
                row = {"start": kind, "utterances": count, "processes": ranks}
                table.add(row | worst._asdict(), f"| {' | '.join(cells)} |")
            assert len(fingerprints) == 1, "corpora differ"
    return 0
