"""`effasr plan`: measures plans of batches before anything is trained."""
