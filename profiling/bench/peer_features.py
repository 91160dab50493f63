"""Features for Hugging Face's FastConformers by our own code.

Its ``ParakeetFeatureExtractor`` needs librosa in versions before 5.23; the values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import LogMel
from effasr_kernels import PackedLayout, PackedSequence


def parakeet_features(
    config: FeatureConfig, audio: Sequence[np.ndarray], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Padded log-mel features as ``ParakeetFeatureExtractor`` returns them.

    Args:
        config: Configuration of kind parakeet.
        audio: float32 samples of each utterance, at ``config.sample_rate``.
        device: Device that computes the features.

    Returns:
        ``input_features``, float32 (B, 1 + longest // hop, mel_bins), zero in the padding, and
        ``attention_mask``, bool (B, 1 + longest // hop), both on ``device``.

    Raises:
        ValueError: The features are Whisper's, or there is no audio.
    """
    if config.kind != "parakeet":
        raise ValueError(f"`config.kind` must be parakeet, but is {config.kind}.")
    if not audio:
        raise ValueError("`audio` must hold at least one utterance, but is empty.")
    lengths = [len(samples) for samples in audio]
    packed = PackedSequence(
        torch.from_numpy(np.concatenate(audio)).to(device),
        PackedLayout.from_lengths(lengths, torch.device(device)),
    )
    frames = PackedLayout.from_lengths(
        [config.encoder_frames(length) for length in lengths], torch.device(device)
    )
    mel = LogMel(config).to(device)(packed, frames)
    counts = [config.mel_frames(length) for length in lengths]
    features = mel.values.new_zeros(len(audio), 1 + max(lengths) // config.hop, config.mel_bins)
    for row, (count, begin) in enumerate(zip(counts, frames.cu_seqlens_host, strict=False)):
        first = begin * config.rows_per_frame
        features[row, :count] = mel.values[first : first + count]
    column = torch.arange(features.shape[1], device=device)
    mask = column < torch.tensor(counts, device=device)[:, None]
    return {"input_features": features, "attention_mask": mask}
