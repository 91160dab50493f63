"""A small synthesised speech corpus, built offline, that a laptop can train on in minutes."""

from effasr.data.demo.corpus import DemoCorpus, SplitStatistics, build

__all__ = ["DemoCorpus", "SplitStatistics", "build"]
