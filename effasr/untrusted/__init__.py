"""Validates untrusted input and escapes untrusted text in output."""
