"""Time and memory of a start with millions of utterances.

    python profiling/data/bench_corpus.py [--utterances 1e6] [--jobs 2] [--ranks 2] [--folder F]

A manifest of lhotse cuts is written (audio is not needed), with durations as in bench_planning.py
and random words, and a tokenizer of 1,000 pieces is trained on some of it. Then, each in processes
of their own:

- plain: one process reads the manifest, and nothing is kept;
- cold: the ranks start together, and nothing is kept yet: one of them reads, the others wait;
- warm: they start together again;
- worker: a process that is forked from a warm one looks at 20,000 random utterances.

Seconds are of the slowest process, from the call to the corpus and the plan's lengths; memory is
that of the largest: what is its own, and what it maps and shares with the others. The baseline
of Python with its packages is shown as well. The page cache is warm.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_planning import draw_lengths

from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.index.corpus_cache import CorpusCache
from effasr.data.tokenizer import load_tokenizer, train_tokenizer

WORDS_PER_SECOND = 2.2
LOOKS = 20_000
LINE = (
    '{{"id": "{name}", "start": 0.0, "duration": {seconds}, "channel": 0, "supervisions": '
    '[{{"id": "{name}", "recording_id": "{name}", "start": 0.0, "duration": {seconds}, '
    '"channel": 0, "text": "{text}", "language": "en"}}], "recording": {{"id": "{name}", '
    '"sources": [{{"type": "file", "channels": [0], "source": "/data/audio/{folder}/{name}.flac"}}'
    '], "sampling_rate": 16000, "num_samples": {samples}, "duration": {seconds}, '
    '"channel_ids": [0]}}, "custom": {{"target_lang": "en", "task": "transcribe", "pnc": true}}, '
    '"type": "MonoCut"}}\n'
)


@dataclass(frozen=True, slots=True)
class Result:
    """Time and memory of a process.

    Attributes:
        seconds: Seconds until it had its corpus.
        cpu_seconds: CPU seconds until then, of the process and of those that read for it.
        before: Its private bytes at the beginning.
        own: Its private bytes with the corpus.
        peak: Its peak memory in bytes, including shared memory.
        mapped: Bytes of files that it maps, which processes share.
        fingerprint: Fingerprint of the corpus.
    """

    seconds: float
    cpu_seconds: float
    before: int
    own: int
    peak: int
    mapped: int
    fingerprint: str


def write_manifest(path: Path, count: int) -> list[str]:
    """Write a manifest; some of its texts."""
    seed = random.Random(0)
    syllables = [a + b for a in "bdfghklmnprstvz" for b in "aeiou"]
    words = ["".join(seed.choices(syllables, k=seed.randint(1, 4))) for _ in range(20_000)]
    pool = seed.choices(words, k=100_000)
    frames = draw_lengths(count).frames
    with gzip.open(path, "wb", compresslevel=1) as file:
        for index, number in enumerate(frames.tolist()):
            begin = index * 7_919 % 99_000
            seconds = number * 0.08
            line = LINE.format(
                name=f"speaker{index % 9_973:05}-chapter{index % 131:03}-{index:09}",
                seconds=round(seconds, 2),
                samples=number * 1_280,
                folder=f"{index % 100:02}",
                text=" ".join(pool[begin : begin + max(1, round(seconds * WORDS_PER_SECOND))]),
            )
            file.write(line.encode())
    return [" ".join(pool[begin : begin + 12]) for begin in range(0, 24_000, 12)]


def start(folder: Path, jobs: int, keep: bool, ready: Any, results: Any) -> None:
    """Run one rank: get the corpus as training does."""
    corpus, result = _measured(folder, jobs, keep, ready)
    results.put(result)
    del corpus


def look(folder: Path, jobs: int, ready: Any, results: Any) -> None:
    """Run a rank with a worker, forked as for loading."""
    corpus, _ = _measured(folder, jobs, True, ready)
    process = multiprocessing.get_context("fork").Process(target=_worker, args=(corpus, results))
    process.start()
    process.join()


def _measured(folder: Path, jobs: int, keep: bool, ready: Any) -> tuple[Corpus, Result]:
    tokenizer = load_tokenizer(folder / "tokenizer")
    before = _memory()["RssAnon"]
    cache = CorpusCache(folder / "cache" if keep else None, _note, jobs=jobs)
    ready.wait()
    begin, cpu_begin = time.perf_counter(), sum(os.times()[:4])
    manifest = folder / "cuts.jsonl.gz"
    corpus = Corpus.load([manifest], tokenizer, DataConfig(), ctc=False, read=cache)
    seconds = time.perf_counter() - begin
    cpu_seconds = sum(os.times()[:4]) - cpu_begin
    now = _memory()
    result = Result(
        seconds,
        cpu_seconds,
        before,
        now["RssAnon"],
        now["VmHWM"],
        now["RssFile"],
        corpus.fingerprint,
    )
    return corpus, result


def _worker(corpus: Corpus, results: Any) -> None:
    before, begin, cpu_begin = _private(), time.perf_counter(), time.process_time()
    for index in np.random.default_rng(0).integers(len(corpus), size=LOOKS).tolist():
        corpus.audio(index)
        corpus._tokens[corpus._rows[index]].tolist()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    own, now = _private(), _memory()
    results.put(Result(seconds, cpu_seconds, before, own, now["VmHWM"], now["RssFile"], ""))


def _memory() -> dict[str, int]:
    """Return bytes, by the names of Linux's /proc/PID/status."""
    with open("/proc/self/status", encoding="ascii") as file:
        rows = (line.split() for line in file)
        return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


def _private() -> int:
    """Return bytes that are no other process's."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty"))


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _run(target: Any, ranks: int, *arguments: Any) -> list[Result]:
    # A forked process would begin with this one's memory.
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(target=target, args=(*arguments, ready, results)) for _ in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _row(name: str, count: int, found: list[Result]) -> str:
    def largest(of: str) -> str:
        return f"{max(getattr(result, of) for result in found) / 1e9:.2f}"

    seconds = max(result.seconds for result in found)
    cpu_seconds = sum(result.cpu_seconds for result in found)
    cells = (name, f"{count:,}", str(len(found)), f"{seconds:.1f}", f"{cpu_seconds:.1f}")
    return "| " + " | ".join((*cells, *map(largest, ("before", "own", "mapped", "peak")))) + " |\n"


def main(arguments: list[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--utterances", nargs="+", type=float, default=[1e6])
    parser.add_argument("--jobs", type=int, help="processes that read (default: as training)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for manifest and corpus, about 1 kB a line")
    parser.add_argument("--skip-plain", action="store_true", help="do not measure the plain start")
    options = parser.parse_args(arguments)
    write = sys.stdout.write
    write("| start | utterances | processes | s | CPU s of all | GB before | GB own | GB mapped ")
    write("| GB peak |\n" + "|---" * 9 + "|\n")
    for count in map(int, options.utterances):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            texts = write_manifest(folder / "cuts.jsonl.gz", count)
            train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=1_000, model_type="bpe")
            fingerprints: set[str] = set()
            kinds = {
                "plain": (1, False),
                "cold": (options.ranks, True),
                "warm": (options.ranks, True),
            }
            for kind, (ranks, keep) in kinds.items():
                if kind == "plain" and options.skip_plain:
                    continue
                found = _run(start, ranks, folder, options.jobs, keep)
                fingerprints |= {result.fingerprint for result in found}
                write(_row(kind, count, found))
                sys.stdout.flush()
            write(_row(f"worker, {LOOKS:,} looks", count, _run(look, 1, folder, options.jobs)))
            assert len(fingerprints) == 1, "corpora differ"


if __name__ == "__main__":
    main()
