import re

import numpy as np
import pytest
import torch

from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import LogMel, MelFrames
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr_kernels import PackedLayout, PackedSequence, pack


def utterances(*samples: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(count, generator=generator) for count in samples]


def log_mel(config: FeatureConfig, audio: list, spare: int = 0, extra: int = 0) -> MelFrames:
    lengths = [config.encoder_frames(len(wave)) for wave in audio]
    count = len(audio) + extra
    spare_samples = config.framing.samples * spare
    packed = pack(audio, rows=sum(map(len, audio)) + spare_samples, num_sequences=count)
    rows = sum(lengths) + spare
    frames = PackedLayout.from_lengths(lengths, rows=rows, num_sequences=count)
    return LogMel(config)(packed, frames)


def real_rows(mel: MelFrames) -> list[torch.Tensor]:
    starts = [mel.subsampling * start for start in mel.layout.cu_seqlens_host]
    return [
        mel.values[start : start + int(length)]
        for start, length in zip(starts, mel.lengths, strict=False)
    ]


@pytest.mark.parametrize("subsampling", [8, 4])
@pytest.mark.parametrize(("mel_bins", "n_fft"), [(64, 512), (80, 512), (128, 512), (128, 1024)])
def test_a_pack_gives_what_transformers_gives_for_each_utterance(mel_bins, n_fft, subsampling):
    transformers = pytest.importorskip("transformers")
    extractor = transformers.ParakeetFeatureExtractor(feature_size=mel_bins, n_fft=n_fft)
    audio = utterances(7000, 1439, 320, 16_001, 1280)
    config = FeatureConfig(mel_bins=mel_bins, n_fft=n_fft, subsampling=subsampling)
    mel = log_mel(config, audio, spare=3, extra=2)
    for wave, ours in zip(audio, real_rows(mel), strict=False):
        expected = extractor(wave.numpy(), sampling_rate=16_000, return_tensors="pt")
        theirs = expected.input_features[0][expected.attention_mask[0]]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_short_and_silent_utterances_are_finite() -> None:
    mel = log_mel(FeatureConfig(), [torch.zeros(3200), *utterances(160, 200, 320, 0)])
    assert torch.isfinite(mel.values).all()
    # One row has no variance: it is its own mean.
    assert real_rows(mel)[1].abs().max() == 0
    assert log_mel(FeatureConfig(), utterances(100, 0)).values.shape == (0, 80)
    assert not log_mel(FeatureConfig(), utterances(100), spare=2).values.any()


def test_without_normalisation_the_log_of_the_energy_stays() -> None:
    config, (wave,) = FeatureConfig(normalize=False, preemphasis=0.0), utterances(8000)
    quiet, loud = (real_rows(log_mel(config, [scale * wave]))[0] for scale in (1.0, 10.0))
    expected = torch.full_like(quiet, np.log(100.0))
    torch.testing.assert_close(loud - quiet, expected, atol=1e-3, rtol=0)


def test_chunks_and_autocast_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = utterances(9000, 4000)
    expected = log_mel(FeatureConfig(), audio).values
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(log_mel(FeatureConfig(), audio).values, expected)
    monkeypatch.setattr("effasr.data.features.log_mel._CHUNK_ROWS", {"cpu": 24})
    torch.testing.assert_close(log_mel(FeatureConfig(), audio).values, expected, atol=1e-6, rtol=0)


def test_another_dtype_of_the_weights_does_not_round_either() -> None:
    features = LogMel(FeatureConfig())
    expected = features.filterbank.clone()
    for dtype in (torch.bfloat16, torch.float64):
        assert features.to(dtype).window.dtype == torch.float32
        assert torch.equal(features.filterbank, expected)


def test_wrong_frames_are_refused() -> None:
    packed = pack(utterances(3200, 1600))
    with pytest.raises(ValueError, match=r"`frames` must have lengths \(3, 2\).*has \(3, 1\)"):
        LogMel(FeatureConfig())(packed, PackedLayout.from_lengths([3, 1]))


def test_buffers_are_not_in_the_checkpoint_and_survive_the_meta_device() -> None:
    expected = LogMel(FeatureConfig()).filterbank
    with torch.device("meta"):
        features = LogMel(FeatureConfig())
    assert not features.state_dict()
    assert torch.equal(features.filterbank, expected)
    features.to_empty(device="cpu")
    features.reset_parameters()
    assert torch.equal(features.filterbank, expected)


def ones(*lengths: int, bins: int = 80, spare: int = 2) -> MelFrames:
    """Mel rows that are 1 where they are real."""
    frames = [-(-length // 8) for length in lengths]
    layout = PackedLayout.from_lengths(
        frames, rows=sum(frames) + spare, num_sequences=len(frames) + 1
    )
    mel = MelFrames(torch.ones(8 * layout.rows, bins), layout, torch.tensor([*lengths, 0]))
    mel.values.masked_fill_(~mel.mask[:, None], 0.0)
    return mel


def hidden(mel: MelFrames, config: SpecAugmentConfig) -> list[torch.Tensor]:
    """Which of the real rows and bins of each utterance are hidden."""
    values = spec_augment(mel, config)
    assert values.shape == mel.values.shape
    starts = [8 * start for start in mel.layout.cu_seqlens_host]
    return [
        values[start : start + int(length)] == 0
        for start, length in zip(starts, mel.lengths, strict=False)
    ]


def test_time_masks_are_stretches_in_proportion_to_the_utterance() -> None:
    torch.manual_seed(0)
    config = SpecAugmentConfig(time_masks=1, time_width=0.25)
    masks = hidden(ones(*[16, 40] * 100, 3), config)
    for mask in masks[:-2]:
        assert (mask == mask[:, :1]).all()
        assert mask[:, 0].sum() <= len(mask) // 4
    assert max(int(mask[:, 0].sum()) for mask in masks[0:200:2]) == 4
    assert max(int(mask[:, 0].sum()) for mask in masks[1:200:2]) == 10
    assert not masks[-2].any(), "a quarter of 3 rows is less than one row"


def test_the_global_seed_decides() -> None:
    mel, config = ones(100, 60), SpecAugmentConfig(freq_masks=2, time_masks=2, time_width=0.2)
    torch.manual_seed(1)
    first = spec_augment(mel, config)
    second = spec_augment(mel, config)
    torch.manual_seed(1)
    assert torch.equal(spec_augment(mel, config), first)
    assert not torch.equal(second, first)


SAMPLES = (16_000, 31_999, 777, 32_000, 5, 1, 20_123)
WHISPER = {
    "kind": "whisper", "subsampling": 2, "n_fft": 400, "window": 400, "preemphasis": 0.0,
    "normalize": False,
}  # fmt: skip


def waves() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    pairs = zip(SAMPLES, (0.1, 0.01, 0.3, 1.0, 0.1, 0.1, 1e-4), strict=True)
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
    transformers = pytest.importorskip("transformers")
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
    frames, mel = compute(FeatureConfig(**WHISPER, minimum_s=2.0), waves(), tail=3)
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
    assert config.framing.frames(np.array([0, 1, 480_320])).tolist() == [0, 1500, 1501]
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
    ("config", "settings", "message"),
    [
        (FeatureConfig, {"mel_bins": 60}, "multiple of 8"),
        (FeatureConfig, {"window": 600}, "raise `n_fft`"),
        (FeatureConfig, {"hop": 0}, "at least 1"),
        (FeatureConfig, {"hop": 20}, "raise `hop`"),
        (FeatureConfig, {"preemphasis": 1.5}, "in [0, 1]"),
        (FeatureConfig, {"epsilon": 0.0}, "positive"),
        (SpecAugmentConfig, {"freq_masks": -1}, "at least 0"),
        (SpecAugmentConfig, {"time_width": 5.0}, "for 5 % write 0.05"),
        *(
            (FeatureConfig, WHISPER | changes, message)
            for changes, message in (
                ({"kind": "mfcc"}, "`kind` must be one of parakeet, whisper, waveform, but is 'm"),
                ({"subsampling": 3}, "`subsampling` must be 4 or 8 (FastConformer) or 2 (Transf"),
                ({"preemphasis": 0.97}, "`preemphasis` must be 0.0 for features of kind whisper"),
                ({"normalize": True}, "`normalize` must be False for features of kind whisper"),
                ({"n_fft": 512}, "`window` must be 512 for features of kind whisper, but is 400"),
                ({"minimum_s": -1.0}, "`minimum_s` must be at least 0, but is -1.0"),
                ({"hop": 100}, "`window` must be at most 3 hops = 300"),
                (
                    {"kind": "parakeet", "minimum_s": 30.0},
                    "must be 0 for features of kind parakeet",
                ),
                ({"kind": "waveform"}, "`subsampling` must be 1 for features of kind waveform, bu"),
            )
        ),
    ],
)
def test_error_messages(config: type, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**settings)
