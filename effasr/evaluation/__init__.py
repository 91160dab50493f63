"""Word error rates, alignments and comparisons of runs."""
