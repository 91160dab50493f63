"""Commands for audio without text."""
