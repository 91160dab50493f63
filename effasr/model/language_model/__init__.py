"""A causal language model that reads packed speech and text."""
