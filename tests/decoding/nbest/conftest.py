from tests.support.recognition import model, noise, tdt_model, tokenizer

__all__ = ["model", "noise", "tdt_model", "tokenizer"]
