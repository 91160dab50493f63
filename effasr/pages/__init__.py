"""Pages of HTML that need no network: of a run, of a corpus, and the pieces that all share."""
