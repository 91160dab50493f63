"""Searches of several streams that arrive chunk by chunk: greedy, and with a beam."""
