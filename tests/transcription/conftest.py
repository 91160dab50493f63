from tests.support.commands import effasr
from tests.support.recognition import model, noise, saved, tdt_model, tokenizer
from tests.support.streaming_model import streaming_model

__all__ = ["effasr", "model", "noise", "saved", "streaming_model", "tdt_model", "tokenizer"]
