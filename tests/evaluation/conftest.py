from tests.support.commands import effasr
from tests.support.recognition import model, noise, saved, tdt_model, tokenizer

__all__ = ["effasr", "model", "noise", "saved", "tdt_model", "tokenizer"]
