"""A micro-batch of a transducer, as a CUDA graph would record it."""

from pathlib import Path

import pytest

from tests.support import preloaded

WORKER = Path(__file__).with_name("fake_gpu_transducer_worker.py")


@pytest.mark.extended
def test_the_host_reads_nothing_and_every_batch_launches_the_same():
    # In a process of its own: torch can be told of one more device only once, and for good.
    done = preloaded.finished(WORKER, limit_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["rnnt", "tdt", "demo"]
