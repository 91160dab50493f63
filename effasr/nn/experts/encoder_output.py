"""Output of an encoder, as the decoder reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels import PackedSequence


@dataclass(frozen=True, slots=True)
class EncoderOutput(PackedSequence):
    """Encoder output of sequences, with the expert that names choose for each in the decoder."""

    # int64 (N,), see `effasr.data.batch.Batch.expert`; None where the batch names none
    expert: Tensor | None = None

    def with_values(self, values: Tensor) -> EncoderOutput:
        """Return other values under the same layout, with the same experts."""
        return EncoderOutput(values, self.layout, self.expert)


def expert_of(encoded: PackedSequence) -> Tensor | None:
    """Return the expert of each sequence of encoder output, int64 (N,); None for none."""
    return encoded.expert if isinstance(encoded, EncoderOutput) else None
