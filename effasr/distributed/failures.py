"""Failures of ranks: records the first one and selects the rank that reports it."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The command line reports errors by this module, and torch takes a second to import.
    from torch.distributed import Store  # type: ignore[attr-defined]


class TrainingFailed(RuntimeError):
    """The run cannot continue; the message gives the reason and the remedy."""


class PeerFailed(RuntimeError):
    """Another rank failed first and reports the reason, so this rank does not report one."""


@contextmanager
def report_once_per_node(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let only local rank 0 report an error that all processes of a node raise before they join."""
    environment = os.environ if environment is None else environment
    try:
        yield
    except (ValueError, OSError) as error:
        # LOCAL_WORLD_SIZE is set whenever LOCAL_RANK 0 is.
        if "LOCAL_WORLD_SIZE" in environment and int(environment.get("LOCAL_RANK", 0)):
            raise PeerFailed(str(error)) from error
        raise


def write_torchrun_error(reason: str) -> None:
    """Write the reason of a failure to the file that torchrun's final summary quotes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": content}))


def record_failure(store: "Store", rank: int, reason: str, losses: int = 0) -> str | None:
    """Record that a rank failed; return the reason of the rank that failed first, if another did.

    torchrun's store outlives the ranks. A store that ended with its rank records nothing.
    """
    local = f"rank {rank}: {reason.removeprefix(f'rank {rank}: ')}"
    try:
        first = store.compare_set(f"first_failure/{losses}", "", local).decode()
    except RuntimeError:
        return None
    return None if first == local else first
