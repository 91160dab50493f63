"""Support for tests of operations: contracts, tolerances, compilation for other GPUs."""
