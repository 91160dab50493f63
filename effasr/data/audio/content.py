"""Whether a recording can have speech in it: a level above silence, and channels that add up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from effasr.data.audio.audio_file import AudioError, AudioFile, AudioProblem
from effasr.data.audio.loudness import HOP_SECONDS, is_speech, loudness
from effasr.data.audio.waveform import AudioSegment, load_audio
from effasr.data.features.frame_geometry import SAMPLE_RATE

if TYPE_CHECKING:
    from lhotse.cut import Cut

_FRAME, _PARTS = SAMPLE_RATE // 50, 8  # 20 ms
_STEP = 25 * _FRAME
# Speech recorded at 16 bits is unusable below: dither is at -90 dB of full scale.
_SILENCE_DB = -75.0
_SILENCE = 10 ** (_SILENCE_DB / 10)
_LEAST_FRAMES = 4  # a syllable
# Noise that is the same in both channels stays where speech cancels out.
_CANCELLED_DB = -15.0


def check_content(
    cut: "Cut", part: AudioSegment | None = None, file: AudioFile | None = None
) -> float:
    """Decode a cut, and check that it is neither silent nor cancelled by its other channel.

    ``part`` and ``file`` are its segment and its open file where the caller has them. Returns the
    seconds of the longer of its ends, before and after all sounds that may be speech.
    """
    part = part or AudioSegment.of(cut)
    audio = load_audio(part or cut, file=file)
    if part is not None and len(part.channels) > 1:
        # Check that the mean of the channels, which is trained on, is not far weaker than each.
        powers = channel_powers(part)
        loudest = int(np.argmax(powers))
        if _is_cancelled(powers, _power(audio)):
            raise AudioError(
                AudioProblem.ANTIPHASE,
                f"{cut.id}: the channels are in antiphase, so their mean is nearly silent: name "
                f"one of them, such as `channel` {part.channels[loudest]} in the manifest, or let "
                "`effasr prepare --channel loudest` choose.",
            )
    loud = 0
    for begin in range(0, len(audio), _STEP):  # speech is loud in the first of them
        loud += np.count_nonzero(frame_powers(audio[begin : begin + _STEP]) > _SILENCE)
        if loud >= _LEAST_FRAMES:
            break
    else:
        if not audio.any():
            raise AudioError(AudioProblem.SILENT, f"{cut.id}: every sample is zero.")
        raise AudioError(
            AudioProblem.SILENT,
            f"{cut.id}: silent: less than {_LEAST_FRAMES * 20} ms are above {_SILENCE_DB:g} dB of "
            "full scale, without offset and clicks.",
        )
    speech = is_speech(loudness(audio, SAMPLE_RATE))
    places = np.flatnonzero(speech)
    return HOP_SECONDS * int(max(places[0], len(speech) - 1 - places[-1])) if len(places) else 0.0


def frame_powers(audio: np.ndarray) -> np.ndarray:
    """Return the power of each 20 ms, full scale being 1, without constant offset and clicks."""
    count, size = len(audio) // _FRAME, _FRAME // _PARTS
    parts = audio[: count * _FRAME].reshape(-1, size)
    # Variances; without its first sample, a part with an offset loses no precision.
    parts = parts - parts[:, :1]
    squares, sums = np.einsum("ps,ps->p", parts, parts), np.einsum("ps->p", parts)
    powers = (squares / size - (sums / size) ** 2).reshape(count, _PARTS)
    # A click is in one part of a frame; a voice is in all: their median.
    powers.sort(axis=1)
    return (powers[:, _PARTS // 2 - 1] + powers[:, _PARTS // 2]) / 2


def channel_powers(part: AudioSegment) -> list[float]:
    return [_power(load_audio(replace(part, channels=(channel,)))) for channel in part.channels]


def _is_cancelled(powers: Sequence[float], mean: float) -> bool:
    *others, loudest = sorted(powers)
    # Of one channel that is silent the mean is 6 dB lower, of uncorrelated ones 3 dB.
    if not others or others[-1] < 0.1 * loudest or loudest == 0:
        return False
    # The mean of many channels that are not correlated is weak, too.
    uncorrelated = sum(powers) / len(powers) ** 2
    return mean < min(10 ** (_CANCELLED_DB / 10) * loudest, uncorrelated / 4)


class ChannelPowers:
    """Powers of the channels of a recording and of their mean, while it is read."""

    def __init__(self) -> None:
        self._powers: np.ndarray | None = None  # the last is that of the mean

    def add(self, block: np.ndarray) -> None:
        """Add float samples (samples, channels)."""
        if block.shape[1] > 1:
            every = np.column_stack([block, block.mean(axis=1)])
            # The sum of variances of blocks leaves out a constant offset.
            powers = len(block) * every.var(axis=0, dtype=np.float64)
            self._powers = powers if self._powers is None else self._powers + powers

    def cancelled(self) -> int | None:
        """Return the loudest channel if the mean is nearly silent, else None."""
        if self._powers is None or not _is_cancelled(self._powers[:-1].tolist(), self._powers[-1]):
            return None
        return int(np.argmax(self._powers[:-1]))


def _power(audio: np.ndarray) -> float:
    return float(np.var(audio, dtype=np.float64)) if len(audio) else 0.0
