"""Training with a slow node, measured: several processes of one machine stand for nodes."""
