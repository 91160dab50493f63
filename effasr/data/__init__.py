"""From recordings and transcripts to packed batches."""
