"""`attention` in Triton."""
