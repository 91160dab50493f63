"""Building blocks that several operations share."""
