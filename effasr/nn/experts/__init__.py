"""Feed-forward networks with experts, of which a row uses some."""
