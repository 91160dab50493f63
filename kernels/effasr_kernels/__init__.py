"""Operations on packed sequences: one function each, with several implementations."""

from effasr_kernels.dispatch import Backend, BackendUnavailable
from effasr_kernels.packed import PackedLayout, PackedSequence, pack

__all__ = ["Backend", "BackendUnavailable", "PackedLayout", "PackedSequence", "pack"]
