"""Predicts the throughput of training strategies on a cluster with a simulated clock."""
