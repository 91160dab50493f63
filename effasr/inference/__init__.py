"""From recordings to transcripts, and how good they are."""
