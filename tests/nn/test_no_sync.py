"""What runs in every step must not ask the device for a value: the host would wait for it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import LogMel
from effasr.data.features.spec_augment import SpecAugmentConfig, spec_augment
from effasr.model.losses import gather_losses
from effasr.model.whisper_encoder import ConvolutionStem
from effasr.nn.convolution import BatchNorm
from effasr.nn.positions import decoder_sinusoids, relative_sinusoids, whisper_sinusoids
from effasr.nn.predictor import LSTMPredictor, StatelessPredictor
from effasr.nn.subsampling import ConvSubsampling

# The operations that read a value, or whose output has a shape that depends on values.
WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten._unique2.default,
}


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in WAITS, f"{func} waits for the device"
        lists = [item for arg in args if isinstance(arg, list | tuple) for item in arg]
        masks = [x for x in lists if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        assert not ("index" in str(func) and masks), f"{func} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wrong", [lambda x: x.sum().item(), lambda x: x[x > 0]])
def test_the_guard_notices(wrong):
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        wrong(torch.ones(3))


@pytest.mark.parametrize("factor", [4, 8])
def test_nothing_waits_for_the_device(factor):
    examples = [
        Example(id=str(n), audio=torch.randn(n).numpy(), prompt=[1], text=[2, 3], monotonic=True)
        for n in (4000, 100, 2600)
    ]
    config = FeatureConfig(mel_bins=16, subsampling=factor)
    shape = StaticShape(24, token_budget=15, max_sequences=5, framing=config.framing)
    batch = collate(examples, shape, eos_id=4, pad_id=0)
    features, norm = LogMel(config), BatchNorm(6)
    subsampling = ConvSubsampling(16, 4, 6, factor)
    augment = SpecAugmentConfig(freq_masks=2, freq_width=3, time_masks=2)
    with NoWaiting():
        mel = features(batch.audio, batch.frames)
        mel = mel.with_values(spec_augment(mel, augment))
        x = subsampling(mel)
        x = norm(x, batch.frames)
        x.sum().backward()
        relative_sinusoids(batch.frames.max_seqlen, 6, x.device)
        decoder_sinusoids(batch.tokens.layout.positions(), 6)
        rows = torch.ones(batch.tokens.layout.rows, requires_grad=True)
        for predictor in (LSTMPredictor(6, 8, 2), StatelessPredictor(6, 8, 2)):
            predictor(batch.text.values, batch.text.layout).sum().backward()
        losses = gather_losses(
            batch, cross_entropy=rows, ctc=torch.ones(5), transducer=torch.ones(5), penalty=rows
        )
        (losses.cross_entropy + losses.guided).backward()
    assert losses.guided == batch.num_monotonic_targets


def test_nothing_waits_for_the_device_in_whisper():
    config = FeatureConfig(
        kind="whisper", subsampling=2, minimum_s=0.2, mel_bins=16, n_fft=400, window=400,
        preemphasis=0.0, normalize=False,
    )  # fmt: skip
    examples = [Example(str(n), torch.randn(n).numpy(), [1], [2, 3]) for n in (4000, 100, 2600)]
    shape = StaticShape(40, 15, 5, framing=config.framing)
    batch = collate(examples, shape, eos_id=4, pad_id=0)
    features, stem = LogMel(config), ConvolutionStem(16, 8)
    with NoWaiting():
        mel = features(batch.audio, batch.frames)
        mel = mel.with_values(spec_augment(mel, SpecAugmentConfig(freq_masks=1, time_masks=2)))
        x = stem(mel) + whisper_sinusoids(mel.slot_positions, 8)
        x.sum().backward()
