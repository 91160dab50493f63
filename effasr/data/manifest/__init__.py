"""Readers of the manifests that people have: each turns one format into utterances."""
