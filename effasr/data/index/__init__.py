"""Index of all utterances of a run, built once and shared by processes."""
