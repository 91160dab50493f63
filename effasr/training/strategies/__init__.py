"""The values of ``training.strategy``: distribution of weights and synchronization of ranks."""
