"""Answers of a speech language model: its cache, greedy and beam search."""
