"""Noise, reverberation and telephone bandwidth for training audio, before it is packed."""
