from tests.support.recognition import model, noise, tdt_model, tokenizer
from tests.support.streaming_model import streaming_model

__all__ = ["model", "noise", "streaming_model", "tdt_model", "tokenizer"]
