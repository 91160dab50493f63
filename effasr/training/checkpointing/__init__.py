"""Checkpoints of a run: written, resumed, averaged."""
