"""A micro-batch as one CUDA graph."""
