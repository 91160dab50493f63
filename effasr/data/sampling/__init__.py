"""Plans which utterances share a batch."""
