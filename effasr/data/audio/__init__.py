"""Reads waveforms from audio files."""
