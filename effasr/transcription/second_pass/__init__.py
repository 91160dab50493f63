"""Second pass over lists of alternatives."""
