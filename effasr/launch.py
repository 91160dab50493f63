"""torchrun with short errors: ``python -m effasr.launch --nproc-per-node N effasr/train.py ...``.

The options are those of torchrun. When a process of the run fails, torchrun adds a traceback of its
own and a summary of some 40 lines to the one line in which the process has given the reason. Here
nothing follows that line; for a process that could not give a reason, such as a killed one, one
line names its end. The exit code is that of the process which failed first; 128 + n for signal n.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import DistNetworkError  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from effasr.untrusted.display import open_standard_streams

_ELASTIC = "torch.distributed.elastic"
_HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Signals that torchrun passes on to the ranks by default; the others end it alone."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the processes, wait for their end and return the exit code."""
    open_standard_streams()
    options = parse_args(arguments)
    if options.signals_to_handle == _HANDLED:
        options.signals_to_handle += ",SIGUSR1,SIGUSR2"
    if options.shutdown_timeout is None:
        # torchrun's half minute is less than a large checkpoint may take.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    # What it logs of the end of processes is in the line of the failed one; restarts are reported.
    quiet = logging.getLogger(f"{_ELASTIC}.multiprocessing")
    if not options.max_restarts:
        quiet.setLevel(logging.CRITICAL)
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = _first(error)
        if not isinstance(failure.message, dict):
            sys.stderr.write(f"effasr.launch: {_end(rank, failure)}\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        sys.stderr.write(f"effasr.launch: stopped by {error.sigval.name}.\n")
        return 128 + error.sigval
    except DistNetworkError:
        port = options.master_port
        sys.stderr.write(f"effasr.launch: port {port} is in use: set --master-port to another.\n")
        return 2
    except (ValueError, RendezvousError) as error:
        # Of torchrun itself: the processes are others.
        sys.stderr.write(f"effasr.launch: {' '.join(str(error).split())}\n")
        return 2
    return 0


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, int]:
        # torchrun itself ends the others by SIGTERM; its times are whole seconds.
        return item[1].exitcode == -signal.SIGTERM, item[1].timestamp

    return min(error.failures.items(), key=order)


def _end(rank: int, failure: ProcessFailure) -> str:
    """Return the end of a process that left no reason."""
    where = f"rank {rank} (local rank {failure.local_rank}, process {failure.pid})"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " The kernel may have ended it for want of memory." if name == "SIGKILL" else ""
        return f"{where} was ended by {name}.{hint}"
    return f"{where} ended with exit code {failure.exitcode}."


if __name__ == "__main__":
    sys.exit(main())
