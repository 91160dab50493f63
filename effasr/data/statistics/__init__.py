"""Statistics of a corpus: counts, encoder frames per token, and vocabulary sizes that fit."""
