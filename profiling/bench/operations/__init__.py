"""Each operation beside the ways in which others compute it."""
