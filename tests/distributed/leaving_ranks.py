"""One rank of a run that joins and leaves, with a model that outlives the group.

Arguments: how many times, and ``cpu``, or ``cuda`` for a rank that leaves after an error as one
with a GPU does.
"""

import faulthandler
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.distributed import process_group
from effasr.distributed.failures import PeerFailed
from effasr.distributed.process_group import distributed_context


def references(groups: list[dist.ProcessGroup]) -> list[int]:
    return [sys.getrefcount(group) for group in groups]


def main(times: str, device: str) -> int:
    torch.set_num_threads(1)
    groups: list[dist.ProcessGroup] = []
    seen: list[list[int]] = []
    destroy = dist.destroy_process_group

    def destroyed():
        seen.append(references(groups))
        destroy()

    dist.destroy_process_group = destroyed
    if device == "cuda":
        process_group._rank_device = lambda *_: torch.device("cuda", 0)
        torch.cuda.set_device = lambda _: None
    for _ in range(int(times)):
        # A deadlock with the GIL ends by this alone, which says where.
        faulthandler.dump_traceback_later(25.0, exit=True)
        with (
            suppress(ZeroDivisionError, PeerFailed),
            distributed_context("cpu", timeout_s=30.0, on_host=True) as context,
        ):
            model = DistributedDataParallel(nn.Linear(4, 4), process_group=context.group)
            model(torch.randn(2, 4)).sum().backward()
            context.all_reduce(torch.ones(3))
            context.all_gather(context.rank)
            context.new_group()
            groups[:] = dist.distributed_c10d._world.pg_map
            seen.append(references(groups))
            if device == "cuda":
                raise ZeroDivisionError
        if device == "cuda":
            seen.append(references(groups))
        before, after = seen
        assert len(before) == 2
        # Each has one more reference, which nobody drops: the destructor does not run.
        assert all(new > old for new, old in zip(after, before, strict=True)), seen
        assert dist.is_initialized() == (device == "cuda")
        seen.clear()
        groups.clear()
        # The last user of the group, right after it was left.
        del model
    sys.stdout.write("left\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
