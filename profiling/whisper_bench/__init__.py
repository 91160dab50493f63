"""Whisper fine-tuned and decoded by several systems with the same weights; see bench_whisper.py."""
