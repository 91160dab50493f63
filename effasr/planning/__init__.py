"""What a plan of batches costs, before anything is trained: `effasr plan`."""
