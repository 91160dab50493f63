from effasr_kernels.update_running_statistics import UpdateArguments


def run(*updates: UpdateArguments) -> None:
    for a in updates:
        _update(a)


def _update(a: UpdateArguments) -> None:
    a.num_batches.add_(1)
    count, dtype = a.layout.total, a.running_mean.dtype
    if count == 0:
        return
    unbiased = a.variance * (count / max(count - 1, 1))
    a.running_mean.lerp_(a.mean.to(dtype), a.momentum)
    a.running_variance.lerp_(unbiased.to(dtype), a.momentum)
