"""What modules and operations compute with the C++ kernels of ``csrc/`` and oneDNN on a CPU."""
