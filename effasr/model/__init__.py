"""Speech models: encoder, decoder, heads and their losses."""
