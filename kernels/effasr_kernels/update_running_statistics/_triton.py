"""`update_running_statistics` in Triton: one small kernel instead of ten of PyTorch."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.runtime.launch import ceil_div, launch, refusal
from effasr_kernels.update_running_statistics import UpdateArguments

_BLOCK = 256


def unsupported_reason(a: UpdateArguments) -> str | None:
    return refusal(a.mean)


def run(a: UpdateArguments, *others: UpdateArguments) -> None:
    updates = a, *others
    channels = a.mean.shape[0]
    launch(
        update,
        # Without channels, too, one program counts the batch.
        (max(1, ceil_div(channels, _BLOCK)), len(updates)),
        tuple(x.running_mean for x in updates),
        tuple(x.running_variance for x in updates),
        tuple(x.num_batches for x in updates),
        tuple(x.mean.contiguous() for x in updates),
        tuple(x.variance.contiguous() for x in updates),
        *(a.layout.cu_seqlens, a.layout.num_sequences, channels, a.momentum),
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["sequences"])
def update(
    running_means,  # l times (C,), contiguous, written
    running_variances,  # l times (C,), contiguous, written
    nums_batches,  # l times int64 (), written
    means,  # l times (C,), contiguous
    variances,  # l times (C,), contiguous
    cu_seqlens,  # int32 (N + 1,)
    sequences,  # N
    channels,  # C
    momentum,  # share of the new statistics
    BLOCK: tl.constexpr,
):
    """Update a block of channels of a layer; its first program also counts the batch."""
    running_mean, running_variance, num_batches = (
        running_means[0],
        running_variances[0],
        nums_batches[0],
    )
    mean, variance = means[0], variances[0]
    for layer in tl.static_range(1, len(running_means)):
        is_here = tl.program_id(1) == layer
        running_mean = tl.where(is_here, running_means[layer], running_mean)
        running_variance = tl.where(is_here, running_variances[layer], running_variance)
        num_batches = tl.where(is_here, nums_batches[layer], num_batches)
        mean = tl.where(is_here, means[layer], mean)
        variance = tl.where(is_here, variances[layer], variance)
    if tl.program_id(0) == 0:
        number = tl.load(num_batches)
        # All warps load it, and one of them stores.
        tl.debug_barrier()
        tl.store(num_batches, number + 1)
    count = tl.load(cu_seqlens + sequences)
    if count > 0:
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        in_channels = c < channels
        wide = count.to(tl.float32)
        unbiased = tl.div_rn(wide, tl.maximum(wide - 1, 1.0))
        old = tl.load(running_mean + c, mask=in_channels).to(tl.float32)
        new = tl.load(mean + c, mask=in_channels).to(tl.float32)
        old += momentum * (new - old)
        tl.store(running_mean + c, old.to(running_mean.dtype.element_ty), mask=in_channels)
        old = tl.load(running_variance + c, mask=in_channels).to(tl.float32)
        new = tl.load(variance + c, mask=in_channels).to(tl.float32) * unbiased
        old += momentum * (new - old)
        tl.store(running_variance + c, old.to(running_variance.dtype.element_ty), mask=in_channels)
