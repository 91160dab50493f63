"""Support for tests and measurements of operations: compilation for other GPUs."""
