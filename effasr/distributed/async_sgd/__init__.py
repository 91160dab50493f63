"""Asynchronous SGD: learners that average their weights in pairs."""
