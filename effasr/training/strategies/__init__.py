"""The values of ``training.strategy``: who holds which weights, and who waits for whom."""
