"""The transducer's loss beside other ways to compute it, and what those ways share."""
