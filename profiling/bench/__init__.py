"""The pieces of bench_ops.py: workloads, clocks, and each operation with its peers."""
