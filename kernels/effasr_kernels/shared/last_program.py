"""Sums that the last program of a launch finishes, in the place of a second launch.

Each program of a group, such as those of one block of channels, writes its part of a sum and then
calls `is_last_program`. The one for which that is true reads all parts and adds them up in the
order of their numbers. Which program is the last changes from run to run, but no sum depends on it.

It is correct by the memory model of PTX (https://docs.nvidia.com/cuda/parallel-thread-execution,
"Memory Consistency Model"). The barrier before the addition to the counter orders the stores of all
threads of a program before the addition, which is a release at the scope of the GPU and so hands
on all that is ordered before it. Additions to a counter form a chain: the one that finds all others
counted is an acquire of every release in the chain. The barrier behind it hands on what it acquired
to the other threads of the last program. No program waits for another, so the order in which they
run and how many run concurrently do not matter.

It costs a program a barrier and an atomic addition; other programs of the multiprocessor hide their
latency. The last program of a group reads all parts alone, from the L2 cache, while the rest of the
launch has ended: use it for tens of kilobytes a group, and only for sums that cannot wait for the
sums of the layer (`effasr_kernels.shared.partial_sums`).
"""

import triton
import triton.language as tl


@triton.jit
def is_last_program(counters, group, programs):
    """Count this program as finished; return whether it is the last of the `programs` of its group.

    Every program of the group must call this once, from all of its threads, behind its stores. The
    last program may then read what the others stored, with ``cache_modifier=".cg"`` because each
    value is read once. `counters`, int32 (groups,), are 0 again behind the launch.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu") == programs - 1
    if is_last:
        # For the next launch. No program is left that reads it.
        tl.store(counters + group, 0)
    tl.debug_barrier()
    return is_last
