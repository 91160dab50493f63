"""Lists of the best hypotheses of a search."""
