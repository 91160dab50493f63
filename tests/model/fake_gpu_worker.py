"""Forward and backward of every kind of model on fake tensors of a made-up accelerator.

Fake tensors hold no values, so whatever asks the device for one fails; and they know their device,
so a tensor left on the host is noticed. The device is not called cuda, because autograd needs
torch to be built for a device of that name. The operations are those of torch's dispatcher: their
references, which may read lengths, do not run here.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[2] / "profiling"))

from census.fake_gpu import NAME as DEVICE
from census.fake_gpu import fake_batch, materialize, register

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import LogMel
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig

VOCABULARY = 40
DROPOUT = {"input_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1}


class OneDevice(TorchDispatchMode):
    """Refuses tensors of the host beside those of the device; a copy between them waits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        # An operation takes its dropout's seed from the host, and reads it there.
        ours = "effasr." in str(func)
        devices = {x.device.type for x in tensors if not (ours and x.ndim == 0)}
        assert len(devices) <= 1, f"{func} mixes devices: {devices}"
        # On CUDA the number of `x[index] = number` is copied from the host, and waited for.
        number = "index_put" in str(func) and args[2].ndim == 0
        assert not number, f"{func} puts a number: use index_fill_"
        return out


def batch_on_device(framing: Framing, *, static: bool) -> Batch:
    def example(samples: int, tokens: int, monotonic: bool = True) -> Example:
        audio = np.zeros(samples, dtype=np.float32)
        text = list(range(8, 8 + tokens))
        return Example(id="", audio=audio, prompt=[7, 5], text=text, monotonic=monotonic)

    shape = StaticShape(frame_budget=80, token_budget=50, max_sequences=6, framing=framing)
    examples = [example(14_005, 5), example(100, 1), example(8_000, 4, monotonic=False)]
    real = collate(examples, shape if static else None, eos_id=3, pad_id=2, framing=framing)
    return fake_batch(real).to(DEVICE)


def model_on_device(config: ModelConfig, mode: FakeTensorMode, dtype: torch.dtype) -> ASRModel:
    """In training mode; the weights in ``dtype``, the features in float32 as always."""
    with torch.device("meta"):
        model = ASRModel(config, VOCABULARY).train().to(dtype)
    for module in model.modules():
        if isinstance(module, LogMel):
            module.float()
    with mode:
        materialize(model, torch.device(DEVICE))
    return model


def variants() -> Iterator[ModelConfig]:
    for position, norm, other in product(
        ("relative", "rotary", "none"), ("batch_norm", "layer_norm"), (True, False)
    ):
        encoder = FastConformerConfig(
            width=32,
            layers=1,
            heads=4,
            feed_forward=48,
            subsampling=8 if other else 4,
            subsampling_channels=8,
            position=position,
            conv_norm=norm,
            position_dropout=0.1,
            subsampling_norm=other,
            scale_input=other,
            input_positions=0.3 * other,
            **DROPOUT,
        )
        decoder = DecoderConfig(
            width=24, layers=1, heads=2, head_dim=8, tie_embeddings=other, **DROPOUT
        )
        yield ModelConfig(
            features=FeatureConfig(mel_bins=16),
            spec_augment=SpecAugmentConfig(freq_masks=2, freq_width=3, time_masks=2),
            encoder=encoder,
            decoder=decoder,
            ctc=other,
            transducer=TransducerConfig(
                predictor="lstm" if other else "stateless", width=16, joint=12, dropout=0.1
            ),
        )
    whisper = ModelConfig(
        features=FeatureConfig(
            kind="whisper",
            subsampling=2,
            mel_bins=16,
            n_fft=400,
            window=400,
            preemphasis=0.0,
            normalize=False,
        ),
        spec_augment=SpecAugmentConfig(freq_masks=2, freq_width=3, time_masks=2),
        encoder=WhisperEncoderConfig(width=32, layers=1, heads=4, feed_forward=48, **DROPOUT),
        decoder=DecoderConfig(
            width=32,
            layers=1,
            heads=4,
            feed_forward=48,
            positions="learned",
            activation="gelu",
            embedding_norm=False,
            key_bias=False,
            output_bias=False,
            **DROPOUT,
        ),
        ctc=True,
        transducer=TransducerConfig(predictor="stateless", width=16, joint=12, dropout=0.1),
    )
    yield whisper
    for family, norm, time_masks in (("wav2vec2", "layer", 2), ("wavlm", "group", 0)):
        encoder = Wav2Vec2EncoderConfig(
            family=family,
            width=32,
            layers=1,
            heads=4,
            channels=8,
            position_kernel=16,
            convolution_norm=norm,
            pre_norm=norm == "layer",
            adapter=8 if norm == "layer" else None,
            **DROPOUT,
        )
        masking = replace(whisper.spec_augment, time_masks=time_masks)
        features = FeatureConfig(kind="waveform", hop=320)
        yield replace(whisper, features=features, encoder=encoder, spec_augment=masking)


def check_step(config: ModelConfig, dtype: torch.dtype) -> None:
    mode = FakeTensorMode()
    model = model_on_device(config, mode, dtype)
    with mode:
        batch = batch_on_device(config.features.framing, static=config.ctc)
    with mode, OneDevice():
        losses = model(batch, label_smoothing=0.1, guided_sigma=0.3 if config.ctc else None)
        (losses.cross_entropy + losses.ctc + losses.transducer + losses.guided).backward()
    for x in (
        losses.cross_entropy,
        losses.ctc,
        losses.transducer,
        losses.guided,
        losses.per_utterance,
    ):
        assert (x.device.type, x.dtype) == (DEVICE, torch.float32), (config, x)
    assert losses.per_utterance.shape == (batch.frames.num_sequences,)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.device, parameter.grad.dtype) == (parameter.device, dtype), name


def check_the_guard_notices() -> None:
    wrongs: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x * torch.ones(3),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.__setitem__(x.long(), 0.0),
        lambda x: torch.tensor([1, 2], device=x.device),
    )
    with FakeTensorMode():
        x = torch.empty(3, device=DEVICE)
        for number, wrong in enumerate(wrongs):
            try:
                with OneDevice():
                    wrong(x)
            except (AssertionError, RuntimeError):
                continue
            raise SystemExit(f"The guard does not notice wrong number {number}.")


if __name__ == "__main__":
    register()
    check_the_guard_notices()
    count = 0
    for index, config in enumerate(variants()):
        check_step(config, (torch.float32, torch.bfloat16)[index % 4 // 2])
        count += 1
    sys.stdout.write(f"{count} forwards and backwards\n")
    if find_spec("transformers"):
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests.model.language_model.conversations_on_device import check_conversations

        count = check_conversations(OneDevice, DEVICE, model_on_device)
        sys.stdout.write(f"{count} of conversations\n")
