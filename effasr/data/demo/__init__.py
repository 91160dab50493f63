"""A small synthesised speech corpus, built offline, that a laptop can train on in minutes."""
