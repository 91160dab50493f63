"""Audio files to waveforms."""
