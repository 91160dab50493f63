"""Greedy searches of several streams that arrive chunk by chunk."""
