"""The worker process: reads a job from standard input, writes audio files, answers durations.

Run as ``python -m effasr.data.demo.render``. One process makes one shard and ends, because the
synthesiser carries state from sentence to sentence.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import soundfile

from effasr.data.demo.acoustics import SAMPLE_RATE, record
from effasr.data.demo.espeak import Espeak
from effasr.data.demo.plan import Recording


def render(root: Path, recordings: Sequence[Recording]) -> list[int]:
    """Synthesise recordings into 16-bit WAV files under ``root``.

    WAV, not FLAC: measured on this corpus it is read three to four times as fast, and with
    noise in every file FLAC saves only a quarter of the space.

    Returns:
        Samples at 16 kHz of each recording, in order.
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
