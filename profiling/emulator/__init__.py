"""Kernels without a GPU: what Triton or nvcc compiles runs in PTX, instruction by instruction.

Warps advance in random order, and what a GPU would do wrong is an error: races between warps or
blocks, copies and products that nobody waits for, addresses outside of every tensor.
"""
