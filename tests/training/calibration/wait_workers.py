"""What each of two processes does in test_settle.py; each scenario is a function."""

import sys
import time
from collections.abc import Callable

from effasr.distributed.process_group import joined
from effasr.training.calibration.calibrate import on_rank_zero
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory


def wait() -> None:
    with joined("cpu", timeout_s=4.0) as world:

        def work(alive: Callable[[], None]) -> str:
            for _ in range(13):
                time.sleep(0.4)
                alive()
            return f"found on {world.rank}"

        sys.stdout.write(on_rank_zero(work, world, 0.5) + "\n")


def fail() -> None:
    with joined("cpu", timeout_s=20.0) as world:

        def work(alive: Callable[[], None]) -> str:
            alive()
            raise OutOfMemory("nothing fits")

        on_rank_zero(work, world, 0.0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
