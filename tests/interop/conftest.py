from tests.support.small_model import (
    examples,
    is_causal,
    make_batch,
    subsampling,
    tiny_config,
    tiny_model,
)

__all__ = ["examples", "is_causal", "make_batch", "subsampling", "tiny_config", "tiny_model"]
