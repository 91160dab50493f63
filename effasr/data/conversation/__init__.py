"""Conversations of text and speech: reading, tokenizing, indexing and packing."""
