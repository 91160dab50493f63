"""Launches, bytes and FLOPs of a training step, counted on fake tensors without a GPU."""
