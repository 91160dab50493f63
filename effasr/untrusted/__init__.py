"""Checks of input that others made, and of output that others see."""
