"""The training loop and its records."""
