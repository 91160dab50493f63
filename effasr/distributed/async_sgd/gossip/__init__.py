"""Learners that average their weights in pairs, while they compute, and never wait for each other.

Asynchronous decentralised SGD (AD-PSGD, Lian et al. 2018; with synchronous super-learners,
H-ADPSGD, Zhang et al. 2019). Read `effasr.distributed.async_sgd.gossip.mixer` first.
"""
