"""The training side of asynchronous SGD."""
