"""Benchmarks of each operation against other implementations."""
