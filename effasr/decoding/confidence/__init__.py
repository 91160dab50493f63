"""Confidence of tokens and words from the entropy of a model's distributions."""
