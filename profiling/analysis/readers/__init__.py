"""Captures and run directories, read into one table whatever wrote them."""
