"""Commands of speech language models."""
