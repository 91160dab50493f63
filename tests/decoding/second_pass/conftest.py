from tests.support.recognition import model, noise, tokenizer

__all__ = ["model", "noise", "tokenizer"]
