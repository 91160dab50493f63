import signal

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from threads, and parallel test processes lose by them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell that runs tests in the background has them ignore SIGINT, which some tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
