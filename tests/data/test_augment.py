import pytest
import torch

from effasr.data.features.log_mel import MelFrames
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr_kernels import PackedLayout


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
def test_a_wrong_configuration_names_the_remedy(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecAugmentConfig(**{field: value})
