import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from threads, and parallel test processes lose by them."""
    torch.set_num_threads(1)
