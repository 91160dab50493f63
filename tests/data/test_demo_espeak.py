"""The library is global to a process, so these tests run it in processes of their own."""

import json
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from effasr.data.demo.plan import VARIANTS, voices

pytest.importorskip("espeakng_loader")

SPECTRA = """
import json, sys
import numpy as np
from effasr.data.demo.acoustics import Espeak
espeak = Espeak()
spectra = {}
for name in json.loads(sys.argv[1]):
    espeak.select(name)
    audio = espeak.speak(sys.argv[2], rate=175, pitch=50)
    audio /= np.sqrt(np.mean(audio**2))
    frames = np.lib.stride_tricks.sliding_window_view(audio, 512)[::220] * np.hanning(512)
    power = np.abs(np.fft.rfft(frames))[:, :240].reshape(len(frames), 24, 10) ** 2
    warp = np.linspace(0, len(frames) - 1, 100).round().astype(int)
    spectra[name] = np.log(power.mean(2) + 1e-2)[warp].tolist()
json.dump(spectra, sys.stdout)
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("language", "text"),
    [("en", "seven four two eight one"), ("de", "sieben vier zwei acht eins")],
)
def test_every_voice_exists_and_the_held_out_ones_are_others(language: str, text: str) -> None:
    split_of = {voice: split for split in VARIANTS for voice in voices(split, language)}
    answer = json.loads(run(SPECTRA, json.dumps(list(split_of)), text))
    spectra = {name: np.array(spectrum) for name, spectrum in answer.items()}
    assert set(spectra) == set(split_of)
    for item, other in combinations(split_of, 2):
        if item.partition("+")[0] == other.partition("+")[0]:
            least = 0.3 if split_of[item] == split_of[other] else 0.6
            assert np.abs(spectra[item] - spectra[other]).mean() > least, (item, other)
