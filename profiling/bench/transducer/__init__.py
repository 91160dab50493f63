"""Benchmarks of the transducer's loss against other implementations, and shared parts."""
