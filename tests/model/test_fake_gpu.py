"""The whole model on an accelerator that does not exist: what no test on a CPU can see."""

from importlib.util import find_spec
from pathlib import Path

from tests.support import preloaded

WORKER = Path(__file__).with_name("fake_gpu_worker.py")


def test_a_step_stays_on_the_device_and_asks_it_nothing():
    # In a process of its own: torch can be told of one more device only once, and for good.
    done = preloaded.finished(WORKER)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "15 forwards and backwards" in done.stdout
    if find_spec("transformers"):
        assert "8 of conversations" in done.stdout
