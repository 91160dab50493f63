from tests.support.small_model import examples, make_batch, tiny_config, tiny_model

__all__ = ["examples", "make_batch", "tiny_config", "tiny_model"]
