"""Scores of texts by a second language model, with a tokenizer of its own."""
