import pytest
import torch

from tests.support.small_model import (
    examples,
    is_causal,
    make_batch,
    subsampling,
    tiny_config,
    tiny_model,
)

__all__ = ["examples", "is_causal", "make_batch", "subsampling", "tiny_config", "tiny_model"]


@pytest.fixture
def fresh_compiler():
    """What the compiler has learnt from other tests does not count, and what it learns is lost."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
