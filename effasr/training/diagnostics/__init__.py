"""Warnings about how a model learns: each names what was seen, its likely cause and the remedy."""
