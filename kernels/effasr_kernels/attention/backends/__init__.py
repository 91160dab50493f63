"""Backends of `attention` that call torch or other packages."""
