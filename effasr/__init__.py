"""Padding-free training of speech models."""
