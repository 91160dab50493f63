"""Systems whose training is timed, on batches of the same corpus."""
