"""Asynchronous decentralised SGD: learners average their weights in pairs while they compute.

Learners never wait for each other. The method is AD-PSGD (Lian et al. 2018), and with synchronous
super-learners H-ADPSGD (Zhang et al. 2019). `effasr.distributed.async_sgd.gossip.mixer` explains
it.
"""
