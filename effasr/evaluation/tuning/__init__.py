"""Choice of the weights of a search on a dev set."""
