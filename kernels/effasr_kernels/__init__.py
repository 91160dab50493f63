"""Operations on packed sequences: one function each, with several implementations.

To add an operation, import its function here, which adds its definition to `OPERATIONS`.
"""

from effasr_kernels.append_to_pages import append_to_pages as append_to_pages
from effasr_kernels.attention import Context as Context
from effasr_kernels.attention import RelativeBias as RelativeBias
from effasr_kernels.attention import Rotary as Rotary
from effasr_kernels.attention import attention as attention
from effasr_kernels.audio_windows import audio_windows as audio_windows
from effasr_kernels.batch_norm import batch_norm as batch_norm
from effasr_kernels.best_alignment_loss import best_alignment_loss as best_alignment_loss
from effasr_kernels.bias_activation_dropout import (
    bias_activation_dropout as bias_activation_dropout,
)
from effasr_kernels.ctc_loss import ctc_loss as ctc_loss
from effasr_kernels.decode_attention import decode_attention as decode_attention
from effasr_kernels.depthwise_conv import depthwise_conv as depthwise_conv
from effasr_kernels.dropout_add_layer_norm import dropout_add_layer_norm as dropout_add_layer_norm
from effasr_kernels.gated_activation import gated_activation as gated_activation
from effasr_kernels.grouped_linear import grouped_linear as grouped_linear
from effasr_kernels.guided_attention import guided_attention as guided_attention
from effasr_kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from effasr_kernels.mask_features import mask_features as mask_features
from effasr_kernels.normalize_features import normalize_features as normalize_features
from effasr_kernels.packed import PackedLayout as PackedLayout
from effasr_kernels.packed import PackedSequence as PackedSequence
from effasr_kernels.packed import pack as pack
from effasr_kernels.projected_top_k import projected_top_k as projected_top_k
from effasr_kernels.rms_norm import rms_norm as rms_norm
from effasr_kernels.runtime.dispatch import Backend as Backend
from effasr_kernels.runtime.dispatch import BackendUnavailable as BackendUnavailable
from effasr_kernels.runtime.dispatch import ReferenceOnGPUWarning as ReferenceOnGPUWarning
from effasr_kernels.runtime.dispatch import allow_reference_on_gpu as allow_reference_on_gpu
from effasr_kernels.runtime.torch_op import OPERATIONS as OPERATIONS
from effasr_kernels.runtime.torch_op import TorchOp as TorchOp
from effasr_kernels.strided_depthwise import strided_depthwise as strided_depthwise
from effasr_kernels.subsampling_stem import subsampling_stem as subsampling_stem
from effasr_kernels.transducer_loss import transducer_loss as transducer_loss
from effasr_kernels.update_running_statistics import (
    update_running_statistics as update_running_statistics,
)
