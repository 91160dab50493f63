import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """What the compiler has learnt from other tests does not count, and what it learns is lost."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
