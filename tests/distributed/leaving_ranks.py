"""One rank of a run that joins and leaves many times, with a model that outlives the group."""

import faulthandler
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.distributed.process_group import distributed_context


def main(times: str) -> int:
    torch.set_num_threads(1)
    for _ in range(int(times)):
        # A deadlock with the GIL ends by this alone, which says where.
        faulthandler.dump_traceback_later(25.0, exit=True)
        with distributed_context("cpu", timeout_s=30.0) as context:
            model = DistributedDataParallel(nn.Linear(4, 4), process_group=context.group)
            model(torch.randn(2, 4)).sum().backward()
            context.all_reduce(torch.ones(3))
            context.all_gather(context.rank)
        # The last user of the group, right after it was left.
        del model
    sys.stdout.write("left\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
