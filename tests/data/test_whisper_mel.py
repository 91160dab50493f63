"""Whisper's features, against transformers' feature extractor and in packed batches."""

import re

import numpy as np
import pytest
import torch

from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import LogMel
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr_kernels import PackedLayout, PackedSequence

transformers = pytest.importorskip("transformers")

SAMPLES = (16_000, 31_999, 777, 32_000, 5, 1, 20_123)
WHISPER = {
    "kind": "whisper", "subsampling": 2, "n_fft": 400, "window": 400, "preemphasis": 0.0,
    "normalize": False,
}  # fmt: skip


def waves() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    loudness = (0.1, 0.01, 0.3, 1.0, 0.1, 0.1, 1e-4)
    pairs = zip(SAMPLES, loudness, strict=True)
    return [(random.standard_normal(n) * a).astype(np.float32) for n, a in pairs]


def compute(config: FeatureConfig, audio: list[np.ndarray], *, tail: int = 0):
    frames = [config.encoder_frames(len(item)) for item in audio]
    rows, count = sum(frames) + tail, len(audio) + (2 if tail else 0)
    layout = PackedLayout.from_lengths(
        [len(item) for item in audio], rows=sum(map(len, audio)) + 300 * tail, num_sequences=count
    )
    # What lies behind the last utterance is not read.
    values = torch.full((layout.rows,), 9.0)
    values[: layout.total] = torch.from_numpy(np.concatenate(audio))
    slots = PackedLayout.from_lengths(frames, rows=rows, num_sequences=count)
    return frames, LogMel(config)(PackedSequence(values, layout), slots)


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("tail", [0, 7])
@pytest.mark.parametrize("minimum_s", [2.0, 0.0])
def test_rows_are_those_of_transformers(minimum_s: float, tail: int, bins: int) -> None:
    config = FeatureConfig(**WHISPER, mel_bins=bins, minimum_s=minimum_s)
    frames, mel = compute(config, waves(), tail=tail)
    # Where no silence is asked for, utterances end as if it followed.
    window = 2 if minimum_s else 3
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=window)
    result = mel.values.split([2 * n for n in (*frames, tail)])
    for wave, rows, count in zip(waves(), result, frames, strict=False):
        expected = extractor(wave, sampling_rate=16_000, return_tensors="pt").input_features[0].T
        assert count == (100 if minimum_s else -(-(len(wave) // 160) // 2))
        torch.testing.assert_close(rows, expected[: 2 * count], atol=1e-5, rtol=1e-5)
    assert not result[-1].any()
    assert mel.lengths.tolist()[: len(frames)] == [2 * count for count in frames]
    assert mel.mask.sum() == 2 * sum(frames)


def test_masks_hide_no_silence() -> None:
    config = FeatureConfig(**WHISPER, minimum_s=2.0)
    frames, mel = compute(config, waves(), tail=3)
    torch.manual_seed(0)
    masked = spec_augment(mel, SpecAugmentConfig(time_masks=8, time_width=0.5))
    assert mel.spoken is not None
    assert mel.spoken.tolist() == [*(samples // 160 for samples in SAMPLES), 0, 0]
    result = (masked == 0).all(1).split([2 * n for n in (*frames, 3)])
    hidden = [rows.nonzero()[:, 0].tolist() for rows in result[:-1]]
    for rows, samples in zip(hidden, SAMPLES, strict=True):
        assert max(rows, default=0) < max(1, samples // 160)
    assert all(hidden[number] for number in (0, 1, 3, 6))


def test_frames() -> None:
    config = FeatureConfig(**WHISPER, minimum_s=30.0)
    assert config.framing == Framing(hop=160, subsampling=2, minimum=1500)
    assert [config.encoder_frames(n) for n in (0, 1, 480_000, 480_320)] == [0, 1500, 1500, 1501]
    many = config.framing.frames(np.array([0, 1, 480_320]))
    assert many.tolist() == [0, 1500, 1501]
    assert config.framing.seconds == 0.02
    assert (Framing().seconds, Framing().samples) == (0.08, 1280)
    assert (config.framing.sequences(30_000), Framing().sequences(4000)) == (20, 500)
    by_four = FeatureConfig(subsampling=4).framing
    assert (by_four.seconds, by_four.samples, by_four.sequences(4000)) == (0.04, 640, 250)
    assert [by_four.frames(n) for n in (0, 159, 160, 799, 800)] == [0, 0, 1, 1, 2]
    samples = FeatureConfig(kind="waveform", hop=320).framing
    assert samples.frames(np.array([0, 79, 399, 400, 719, 720])).tolist() == [0, 0, 0, 1, 1, 2]
    assert [samples.frames(n) for n in (79, 399, 400)] == [0, 0, 1]
    assert samples.frames(samples.samples_of(7)) == 7
    assert samples.capacity(7, 2) >= samples.samples_of(4) + samples.samples_of(3) + 2 * 319


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mfcc"}, "`kind` must be one of parakeet, whisper, waveform, but is 'mfcc'"),
        ({"subsampling": 3}, "`subsampling` must be 4 or 8 (FastConformer) or 2 (Transformer)"),
        ({"preemphasis": 0.97}, "`preemphasis` must be 0.0 for features of kind whisper"),
        ({"normalize": True}, "`normalize` must be False for features of kind whisper"),
        ({"n_fft": 512}, "`window` must be 512 for features of kind whisper, but is 400"),
        ({"minimum_s": -1.0}, "`minimum_s` must be at least 0, but is -1.0"),
        ({"hop": 100}, "`window` must be at most 3 hops = 300"),
        (
            {"kind": "parakeet", "minimum_s": 30.0},
            "`minimum_s` must be 0 for features of kind parakeet",
        ),
        ({"kind": "waveform"}, "`subsampling` must be 1 for features of kind waveform, but is 2"),
    ],
)
def test_settings_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FeatureConfig(**{**WHISPER, **changes})
