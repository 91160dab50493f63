"""Keys and values that a decoder keeps from one token to the next."""
