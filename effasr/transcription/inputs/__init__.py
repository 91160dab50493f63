"""Recordings found, read, and cut into chunks."""
