"""Modules of neural networks over packed sequences."""
