"""Tables of the documentation, from profiling/results/*.csv."""
