from tests.support.recognition import model, noise, saved, tdt_model, tokenizer
from tests.support.streaming_model import streaming_model

__all__ = ["model", "noise", "saved", "streaming_model", "tdt_model", "tokenizer"]
