"""From recordings of any length to transcripts."""
