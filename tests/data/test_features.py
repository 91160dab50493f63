import numpy as np
import pytest
import torch

from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import LogMel, MelFrames
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr_kernels import PackedLayout, pack


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mel_bins", 60, "multiple of 8"),
        ("window", 600, "raise `n_fft`"),
        ("hop", 0, "at least 1"),
        ("hop", 20, "raise `hop`"),
        ("preemphasis", 1.5, r"in \[0, 1\]"),
        ("epsilon", 0.0, "positive"),
    ],
)
def test_a_wrong_configuration_names_the_remedy(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureConfig(**{field: value})


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("freq_masks", -1, "at least 0"), ("time_width", 5.0, r"for 5 % write 0\.05")],
)
def test_a_wrong_masking_names_the_remedy(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecAugmentConfig(**{field: value})
