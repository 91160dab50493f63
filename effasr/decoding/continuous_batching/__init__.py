"""Greedy search of the attention decoder with continuous batching."""
