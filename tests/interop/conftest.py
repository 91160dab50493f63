from tests.support.small_model import examples, make_batch, subsampling, tiny_config, tiny_model

__all__ = ["examples", "make_batch", "subsampling", "tiny_config", "tiny_model"]
