"""Which utterances share a batch."""
