"""Operations on packed sequences: one function each, with several implementations."""

from effasr_kernels.append_to_pages import append_to_pages
from effasr_kernels.append_to_pages import op as _append_to_pages
from effasr_kernels.attention import RelativeBias, Rotary, attention
from effasr_kernels.attention import op as _attention
from effasr_kernels.ctc_loss import ctc_loss
from effasr_kernels.ctc_loss import op as _ctc_loss
from effasr_kernels.decode_attention import decode_attention
from effasr_kernels.decode_attention import op as _decode_attention
from effasr_kernels.depthwise_conv import depthwise_conv
from effasr_kernels.depthwise_conv import op as _depthwise_conv
from effasr_kernels.guided_attention import guided_attention
from effasr_kernels.guided_attention import op as _guided_attention
from effasr_kernels.linear_cross_entropy import linear_cross_entropy
from effasr_kernels.linear_cross_entropy import op as _linear_cross_entropy
from effasr_kernels.packed import PackedLayout, PackedSequence, pack
from effasr_kernels.projected_top_k import op as _projected_top_k
from effasr_kernels.projected_top_k import projected_top_k
from effasr_kernels.runtime.dispatch import (
    Backend,
    BackendUnavailable,
    Op,
    ReferenceOnGPUWarning,
    allow_reference_on_gpu,
)
from effasr_kernels.strided_depthwise import op as _strided_depthwise
from effasr_kernels.strided_depthwise import strided_depthwise
from effasr_kernels.subsampling_stem import op as _subsampling_stem
from effasr_kernels.subsampling_stem import subsampling_stem
from effasr_kernels.transducer_loss import op as _transducer_loss
from effasr_kernels.transducer_loss import transducer_loss

OPERATIONS: dict[str, Op] = {
    op.name: op
    for op in (
        _attention,
        _guided_attention,
        _linear_cross_entropy,
        _ctc_loss,
        _transducer_loss,
        _depthwise_conv,
        _subsampling_stem,
        _strided_depthwise,
        _decode_attention,
        _append_to_pages,
        _projected_top_k,
    )
}
"""Every operation by name; `Op.modules` names the backends that are implemented."""

__all__ = [
    "OPERATIONS",
    "Backend",
    "BackendUnavailable",
    "Op",
    "PackedLayout",
    "PackedSequence",
    "ReferenceOnGPUWarning",
    "RelativeBias",
    "Rotary",
    "allow_reference_on_gpu",
    "append_to_pages",
    "attention",
    "ctc_loss",
    "decode_attention",
    "depthwise_conv",
    "guided_attention",
    "linear_cross_entropy",
    "pack",
    "projected_top_k",
    "strided_depthwise",
    "subsampling_stem",
    "transducer_loss",
]
