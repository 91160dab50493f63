"""Out-of-memory errors, non-finite gradients, stalled ranks and signals."""
