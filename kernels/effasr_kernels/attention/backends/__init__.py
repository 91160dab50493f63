"""`attention` by torch's and other packages' implementations."""
