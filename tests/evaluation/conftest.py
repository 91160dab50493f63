from tests.support.recognition import model, noise, saved, tdt_model, tokenizer

__all__ = ["model", "noise", "saved", "tdt_model", "tokenizer"]
