"""The worker process: reads a job from standard input, writes audio files, answers durations.

Run as ``python -m effasr.data.demo.render``. One process makes one shard and ends, because the
synthesiser carries state from sentence to sentence.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import soundfile

from effasr.data.demo.acoustics import SAMPLE_RATE, Espeak, record
from effasr.data.demo.plan import Recording


def render(root: Path, recordings: Sequence[Recording]) -> list[int]:
    """Synthesise recordings into 16-bit WAV files under ``root``.

    WAV, not FLAC: measured on this corpus it is read three to four times as fast, and with
    noise in every file FLAC saves only a quarter of the space.
    """
    espeak = Espeak()
    voice = None
    lengths = []
    for item in recordings:
        if item.voice != voice:
            espeak.select(item.voice)
            voice = item.voice
        audio = record(
            espeak.speak(item.spoken, rate=item.rate, pitch=item.pitch),
            espeak.sample_rate,
            gain_db=item.gain_db,
            snr_db=item.snr_db,
            noise_slope=item.noise_slope,
            lead_s=item.lead_s,
            tail_s=item.tail_s,
            seed=item.seed,
        )
        soundfile.write(root / item.path, audio, SAMPLE_RATE, subtype="PCM_16")
        lengths.append(len(audio))
    return lengths


def main() -> None:
    """Process one job: read ``{"root": ..., "recordings": [...]}``, write a list of lengths."""
    job = json.load(sys.stdin)
    lengths = render(Path(job["root"]), [Recording(**item) for item in job["recordings"]])
    json.dump(lengths, sys.stdout)


if __name__ == "__main__":
    main()


# Spreads the rendering of a corpus over processes.

# Shards are the unit of determinism (see above), so their size must not depend on `jobs`.
_SHARD_RECORDINGS = 400

Progress = Callable[[int, int], None]
"""Called with (recordings made, recordings in all)."""


def render_all(
    root: Path, recordings: Sequence[Recording], jobs: int, progress: Progress | None
) -> dict[str, int]:
    """Make the audio file of every recording."""
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
