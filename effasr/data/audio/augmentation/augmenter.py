"""Augments the audio of an utterance, as a function of seed, epoch, step and utterance."""

import hashlib
import json
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import soxr
from lhotse.cut import Cut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio.audio_file import regular_file_size
from effasr.data.audio.augmentation.config import AudioAugmentationConfig
from effasr.data.audio.cut_sources import check_sources
from effasr.data.audio.silence import with_silence
from effasr.data.audio.waveform import AudioError, AudioProblem, audio_path, load_audio, samples_in
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped
from effasr.data.index.columns import Ragged, RaggedBuilder, json_of
from effasr.data.manifest import folder, nemo
from effasr.data.manifest.cuts import make_absolute, read_cut
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.reader import file_of_lines, folder_format, named
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import FileUtterance
from effasr.data.manifest.walk import AUDIO_SUFFIXES
from effasr.data.prompt import Prompt
from effasr.untrusted.remote import localized

# Adds noise at a signal-to-noise ratio.


_FADE = SAMPLE_RATE // 50
"""Samples over which a clip that begins anew is mixed with its end: 20 ms, so nothing clicks."""


def add_noise(speech: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Add noise at a ratio ``snr`` of the mean powers, in dB; the speech stays as loud as it was.

    Where either is silent there is no ratio, and the speech is returned alone.
    """
    power, noise_power = mean_power(speech), mean_power(noise)
    if power == 0 or noise_power == 0:
        return speech
    gain = math.sqrt(power / noise_power) * 10 ** (-snr / 20)
    return speech + np.float32(gain) * noise


def looped(clip: np.ndarray, samples: int, start: int) -> np.ndarray:
    """Return a stretch of a clip, of at least one sample, that is repeated without end.

    Where it begins anew, its end is faded out under its beginning, at equal power.
    """
    if start + samples <= len(clip):
        return clip[start : start + samples]
    fade = min(_FADE, len(clip) // 2)
    angles = (np.arange(fade, dtype=np.float32) + 0.5) * np.float32(math.pi / 2 / max(1, fade))
    period = clip[: len(clip) - fade].copy()
    period[:fade] = np.sin(angles) * clip[:fade] + np.cos(angles) * clip[len(clip) - fade :]
    repeats = -(-(start % len(period) + samples) // len(period))
    begin = start % len(period)
    return np.tile(period, repeats)[begin : begin + samples]


def mean_power(samples: np.ndarray) -> float:
    """Mean square of samples, summed in float64; 0 of none."""
    if not len(samples):
        return 0.0
    # einsum and not dot: BLAS may sum in another order with another number of threads.
    return float(np.einsum("i,i->", samples, samples, dtype=np.float64)) / len(samples)


# Simulates a telephone channel: 8 kHz and mu-law.

_TELEPHONE_RATE = 8000
_MU = 255.0


def telephone(audio: np.ndarray) -> np.ndarray:
    """Return audio after 8 kHz and 8 bits of mu-law, at the same rate and time.

    What is beyond full scale, 1, is clipped, as a telephone does. The curve is the continuous one,
    of which the standard, ITU-T G.711, has a piecewise linear one.
    """
    narrow = soxr.resample(audio, SAMPLE_RATE, _TELEPHONE_RATE)
    wide = soxr.resample(_expanded(_compressed(narrow)), _TELEPHONE_RATE, SAMPLE_RATE)
    # Resampling to and fro may miss the length by a sample.
    return np.pad(wide, (0, max(0, len(audio) - len(wide))))[: len(audio)]


def _compressed(values: np.ndarray) -> np.ndarray:
    """Return codes from -127 to 127."""
    scale = np.float32(127 / math.log1p(_MU))
    codes = np.rint(np.log1p(np.float32(_MU) * np.minimum(np.abs(values), 1)) * scale)
    return np.copysign(codes, values)


def _expanded(codes: np.ndarray) -> np.ndarray:
    scale = np.float32(math.log1p(_MU) / 127)
    return np.copysign(np.expm1(np.abs(codes) * scale) / np.float32(_MU), codes)


# Adds reverberation: convolution with a room impulse response.

_INAUDIBLE = 1e-6
"""Share of its energy, -60 dB, at which the tail of a recorded response is cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class ImpulseResponse:
    """Room impulse response."""

    values: np.ndarray  # float32 (n,)
    delay: int  # The sample at which the sound arrives that took the direct path

    @classmethod
    def of(cls, recording: np.ndarray) -> "ImpulseResponse":
        """Take a recorded response, float32 (n,), without a silent end.

        The direct path is its largest sample.
        """
        energies = np.cumsum(np.square(recording, dtype=np.float64)[::-1])[::-1]
        if not energies.size or energies[0] == 0:
            raise AudioError(AudioProblem.SILENT, "the impulse response is silent.")
        length = int(np.count_nonzero(energies > _INAUDIBLE * energies[0]))
        return cls(recording[:length], int(np.abs(recording[:length]).argmax()))


def reverberate(speech: np.ndarray, response: ImpulseResponse) -> np.ndarray:
    """Speech in a room, as long and as loud as before, and at the same time.

    The delay of the direct path is taken away, so that what is heard when stays as the text has
    it; what sounds on after the end is cut off. The mean power stays.

    References:
        Ko et al., 2017, A study on data augmentation of reverberant speech for robust speech
        recognition; Kaldi's wav-reverberate with --shift-output.
    """
    received = convolve(speech, response.values)[response.delay : response.delay + len(speech)]
    before, after = mean_power(speech), mean_power(received)
    if before == 0 or after == 0:
        return speech
    return received * np.float32(math.sqrt(before / after))


def convolve(signal: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return the whole convolution, (n + m - 1,), by FFTs of blocks (overlap-add).

    By NumPy and not by torch, whose FFTs may differ in the last bit from one call to the next.
    """
    size = max(8192, 2 ** math.ceil(math.log2(4 * len(kernel))))
    step = size - len(kernel) + 1
    blocks = -(-len(signal) // step)
    padded = np.zeros((blocks, step), dtype=np.float32)
    padded.reshape(-1)[: len(signal)] = signal
    spectra = np.fft.rfft(padded, size, axis=1) * np.fft.rfft(kernel, size)
    parts = np.fft.irfft(spectra, size, axis=1)
    result = np.zeros(blocks * step + size, dtype=np.float32)
    for block in range(blocks):
        result[block * step : block * step + size] += parts[block]
    return result[: len(signal) + len(kernel) - 1]


# Simulates room impulse responses.
#
# In place of lhotse's generator, which needs torchaudio.

_SOUND = 343.0
"""Metres a second."""
_VOLUMES = (30.0, 1000.0)
"""Cubic metres: from an office to a lecture hall."""
_DISTANCES = (0.3, 6.0)
"""Metres from the mouth to the microphone."""
_DECAY = 6 * math.log(10)
"""Decay exponent of the energy over one T60: a factor of exp(-6 ln 10), 60 dB."""


def simulated_room(
    rng: np.random.Generator, decay_time: tuple[float, float] = (0.1, 0.8)
) -> ImpulseResponse:
    """Draw a room, a distance in it, and the reflections between.

    The direct sound is followed by reflections as a room has them in the mean: t seconds after
    the sound was made, 4 pi c^3 t^2 / V of them arrive a second, each with 1 / (c t) of its
    pressure and what walls have left of it, exp(-6.9 t / T60). First there are single echoes,
    then more and more. Beyond one a sample, fewer and stronger ones stand for many.

    References:
        Kuttruff, Room Acoustics, chapters 4 and 5; Polack, 1988, La transmission de l'énergie
        sonore dans les salles.
    """
    t60 = rng.uniform(*decay_time)
    volume = math.exp(rng.uniform(math.log(_VOLUMES[0]), math.log(_VOLUMES[1])))
    low, high = _DISTANCES
    distance = rng.uniform(low, min(high, volume ** (1 / 3)))
    times = distance / _SOUND + np.arange(1, max(2, round(t60 * SAMPLE_RATE))) / SAMPLE_RATE
    arrivals = 4 * math.pi * _SOUND**3 / volume * times**2 / SAMPLE_RATE
    energies = np.exp(-_DECAY / t60 * times) / (_SOUND * times) ** 2
    thinned = np.minimum(arrivals, 1)
    counts = rng.poisson(thinned)
    # A reflection is of either sign, so that what arrives at once adds up in energy.
    signs = 2 * rng.binomial(counts, 0.5) - counts
    reflections = signs * np.sqrt(energies * arrivals / thinned)
    return ImpulseResponse(np.append(1 / distance, reflections).astype(np.float32), 0)


# Lists and checks the recordings to augment with, and reads them when they are needed.

_CACHE_BYTES = 64 * 2**20
"""Decoded audio that each process keeps of a list of clips."""

_WHOLE = 20 * SAMPLE_RATE
"""Samples up to which a clip is read, and kept, as a whole; of longer ones what is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class Clips:
    """Recordings in flat arrays, which forked workers share."""

    samples: np.ndarray  # int64 (n,), lengths at `SAMPLE_RATE`
    fingerprint: str  # Changes if their number, order or a length does
    _lines: Ragged
    _cache: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict)

    @classmethod
    def load(cls, paths: Sequence[str | Path], what: str) -> "Clips":
        """List recordings."""
        lines, samples = RaggedBuilder(), array("q")
        for path in paths:
            before = len(samples)
            try:
                for cut in _cuts(localized(path)):
                    lines.append(json_of(cut))
                    samples.append(samples_in(cut.duration))
            except ValueError as error:
                remedy = " Remove it, or mend it." if isinstance(error, AudioError) else ""
                raise ValueError(f"`{what}`: {error}{remedy}") from error
            if len(samples) == before:
                raise ValueError(f"`{what}`: {path} holds no audio: name another, or leave it out.")
        counts = np.array(samples, dtype=np.int64)
        return cls(counts, hashlib.sha256(counts.data).hexdigest(), lines.build())

    def __len__(self) -> int:
        return len(self.samples)

    def cut(self, index: int) -> Cut:
        return deserialize_cut(json.loads(self._lines[index].tobytes()))

    def read(self, index: int, start: int = 0, samples: int | None = None) -> np.ndarray:
        """Return the samples of a recording from ``start`` on, up to the end by default.

        They are mono, at `SAMPLE_RATE`, and not to be written to.
        """
        end = int(self.samples[index]) if samples is None else start + samples
        if self.samples[index] > _WHOLE:
            seconds = (end - start) / SAMPLE_RATE
            part = self.cut(index).truncate(offset=start / SAMPLE_RATE, duration=seconds)
            audio = load_audio(part)[: end - start]
            # lhotse ends it with the file, which may be half a sample before.
            return np.pad(audio, (0, end - start - len(audio)))
        audio = self._cache.pop(index, None)
        if audio is None:
            audio = load_audio(self.cut(index))
            audio.flags.writeable = False
            held = audio.nbytes + sum(item.nbytes for item in self._cache.values())
            while held > _CACHE_BYTES and self._cache:
                held -= self._cache.popitem(last=False)[1].nbytes
        self._cache[index] = audio
        return audio[start:end]


def _cuts(path: Path) -> Iterator[Cut]:
    if not path.is_dir() and path.suffix.lower() in AUDIO_SUFFIXES and path.is_file():
        return iter([_part(str(path.absolute()), str(path))])
    if (file := file_of_lines(path)) is not None:
        rows = (ManifestRow.parse(line, file, number) for number, line in numbered_lines(file))
        return map(_of_row, rows)
    if folder_format(path) is not folder.FORMAT:
        return (utterance.cut(name) for name, utterance in named(path))
    files = [file for file in folder.all_files(path) if file.suffix.lower() in AUDIO_SUFFIXES]
    return (_part(str(file.absolute()), str(file)) for file in files)


def _of_row(row: ManifestRow) -> Cut:
    """Return the audio of a line, which needs neither text nor supervision."""
    if nemo.FORMAT.detect(row.values):
        offset, duration = row.seconds("offset", zero=True), row.seconds("duration")
        return _part(row.audio("audio_filepath"), row.origin, offset, duration)
    refusal = "neither a line with `audio_filepath` nor a cut or recording that lhotse can read"
    cut = read_cut(row, refusal, allow_recording=True).drop_supervisions()
    if not cut.has_recording:
        raise row.error(f"cut {cut.id!r} has no recording: features are not read.", "recording")
    make_absolute(cut, row.path.parent)
    if (audio := audio_path(cut)) is not None:
        regular_file_size(audio)
    else:
        check_sources(cut)
    return cut


def _part(
    audio: str, origin: str, offset: float | None = None, duration: float | None = None
) -> Cut:
    """Return a file or a part of it; its header is read."""
    name = Path(audio).stem
    utterance = FileUtterance(name, False, origin, audio, "", Prompt(), offset, duration)
    return utterance.cut(name).drop_supervisions()


_REVERBERATION, _NOISE, _TELEPHONE, _SILENCE = range(4)
"""Each kind has a separate random stream, so its effect does not depend on the others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moment:
    """Position of an utterance in a run."""

    epoch: int  # Counted from 0
    step: int  # Counted from 0 in each epoch; an utterance may come more than once in an epoch
    index: int  # Index of the utterance in its corpus


class UnreadableRecording(AudioError):
    """A recording for augmentation cannot be used; the utterance itself is intact."""


class Augmenter:
    """Changes audio as configured."""

    def __init__(
        self, config: AudioAugmentationConfig, *, seed: int, skip_unreadable: bool
    ) -> None:
        """List recordings and check them.

        With ``skip_unreadable``, an utterance stays as it is where its recording cannot be read.
        """
        self._config = config
        self._seed = seed
        self._skip = skip_unreadable
        noise, room = config.noise, config.reverberation
        self._noises = None
        if noise is not None:
            self._noises = Clips.load(noise.manifests, "data.audio_augmentation.noise.manifests")
        self._responses = None
        if room is not None and room.manifests:
            where = "data.audio_augmentation.reverberation.manifests"
            self._responses = Clips.load(room.manifests, where)
        steps = (
            (_REVERBERATION, room, self._reverberate),
            (_NOISE, noise, self._add_noise),
            (_TELEPHONE, config.telephone, lambda audio, *_: telephone(audio)),
        )
        self._steps = [
            (kind, section.probability, apply) for kind, section, apply in steps if section
        ]

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._steps)

    def __str__(self) -> str:
        """Describe the augmentations and their shares of the utterances for the user."""
        room, noise = self._config.reverberation, self._config.noise
        parts = []
        if room is not None:
            rooms = "simulated" if self._responses is None else f"{len(self._responses)} recorded"
            parts.append(f"{100 * room.probability:g} % in {rooms} rooms")
        if noise is not None and self._noises is not None:
            low, high = noise.snr
            share = f"{100 * noise.probability:g} % with noise at {low:g} to {high:g} dB"
            parts.append(f"{share} from {len(self._noises)} recordings")
        if (telephone := self._config.telephone) is not None:
            parts.append(f"{100 * telephone.probability:g} % over the telephone")
        return ", ".join(parts)

    @property
    def fingerprint(self) -> str:
        """Changes if the number, order or length of a recording does; empty without any."""
        used = [clips.fingerprint for clips in (self._noises, self._responses) if clips]
        return hashlib.sha256(" ".join(used).encode()).hexdigest() if used else ""

    def __call__(
        self, audio: np.ndarray, moment: Moment, silence: int = 0
    ) -> tuple[np.ndarray, int, list[Dropped]]:
        """Change audio, after adding so many samples of silence; the number is those before it."""
        unreadable: list[Dropped] = []
        delay = 0
        place = self._seed, moment.epoch, moment.step, moment.index
        if silence:
            random = np.random.default_rng((*place, _SILENCE))
            audio, delay = with_silence(audio, silence, random)
        for kind, probability, apply in self._steps:
            rng = np.random.default_rng((*place, kind))
            if rng.random() < probability:
                audio = apply(audio, rng, unreadable)
        return audio, delay, unreadable

    def _reverberate(
        self, audio: np.ndarray, rng: np.random.Generator, unreadable: list[Dropped]
    ) -> np.ndarray:
        config, responses = self._config.reverberation, self._responses
        assert config is not None
        if responses is None:
            return reverberate(audio, simulated_room(rng, config.decay_time))
        index = int(rng.integers(len(responses)))
        response = self._tried(
            responses, index, lambda: ImpulseResponse.of(responses.read(index)), unreadable
        )
        return audio if response is None else reverberate(audio, response)

    def _add_noise(
        self, audio: np.ndarray, rng: np.random.Generator, unreadable: list[Dropped]
    ) -> np.ndarray:
        config, noises = self._config.noise, self._noises
        assert config is not None
        assert noises is not None
        snr = rng.uniform(*config.snr)
        index = int(rng.integers(len(noises)))
        length = int(noises.samples[index])
        spare = length - len(audio)
        # Of a long clip a stretch; a short one is repeated from anywhere in it.
        start = int(rng.integers(spare + 1 if spare >= 0 else length))
        if spare >= 0:
            read = lambda: noises.read(index, start, len(audio))
        else:
            read = lambda: looped(noises.read(index), len(audio), start)
        noise = self._tried(noises, index, read, unreadable)
        return audio if noise is None else add_noise(audio, noise, snr)

    def _tried(
        self, clips: Clips, index: int, read: Callable[[], T], unreadable: list[Dropped]
    ) -> T | None:
        """Return the result of ``read``, or list the clip as unreadable and return None."""
        try:
            return read()
        except AudioError as error:
            cut = clips.cut(index)
            path = audio_path(cut) or ""
            details = str(error) if path in str(error) else f"{path}: {error}"
            details = f"`data.audio_augmentation`: {details}"
            if not self._skip:
                raise UnreadableRecording(error.problem, details) from error
            unreadable.append(Dropped(cut.id, error.problem, details, path, cut.duration))
            return None
