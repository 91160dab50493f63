"""Checkpoints of other toolkits, read and written."""
