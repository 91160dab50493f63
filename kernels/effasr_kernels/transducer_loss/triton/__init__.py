"""`transducer_loss` in Triton."""
