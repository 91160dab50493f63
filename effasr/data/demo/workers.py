"""Spreads the rendering of a corpus over processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from effasr.data.demo.plan import Recording

# Shards are the unit of determinism (see espeak.py), so their size must not depend on `jobs`.
_SHARD_RECORDINGS = 400

Progress = Callable[[int, int], None]
"""Called with (recordings made, recordings in all)."""


def render_all(
    root: Path, recordings: Sequence[Recording], jobs: int, progress: Progress | None
) -> dict[str, int]:
    """Make the audio file of every recording.

    Returns:
        Path of each recording -> its length in samples at 16 kHz.

    Raises:
        RuntimeError: A worker failed; the others were waited for.
    """
    by_voice = sorted(recordings, key=lambda item: (item.voice, item.path))
    shards = [
        by_voice[i : i + _SHARD_RECORDINGS] for i in range(0, len(by_voice), _SHARD_RECORDINGS)
    ]
    lengths: dict[str, int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_run_worker, root, shard): shard for shard in shards}
        try:
            for future in as_completed(futures):
                paths = (item.path for item in futures[future])
                lengths |= zip(paths, future.result(), strict=True)
                if progress is not None:
                    progress(len(lengths), len(by_voice))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return lengths


def _run_worker(root: Path, shard: Sequence[Recording]) -> list[int]:
    """Render one shard in a fresh process; return the samples of each recording.

    A plain subprocess: multiprocessing would import the user's main module again, which fails in
    scripts without a main guard and in code read from standard input.
    """
    job = {"root": str(root.resolve()), "recordings": [asdict(item) for item in shard]}
    done = subprocess.run(
        [sys.executable, "-m", "effasr.data.demo.render"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"demo corpus: a worker ended with {done.returncode}: {reason}")
    return json.loads(done.stdout)
