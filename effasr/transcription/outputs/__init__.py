"""Transcripts written as text, subtitles and JSON."""
