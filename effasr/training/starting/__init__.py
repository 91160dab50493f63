"""Weights that a run starts from."""
