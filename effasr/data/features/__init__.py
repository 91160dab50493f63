"""Log-mel features of packed audio, and SpecAugment."""
