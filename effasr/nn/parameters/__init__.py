"""Patterns of parameter names, and parameters that are unused or sharded."""
