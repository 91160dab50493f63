"""Readers of manifests: each turns one format into utterances."""
