"""Greedy and beam searches of CTC, transducer and attention decoders."""
