"""What a cluster makes of a training strategy, predicted with a clock that only counts."""
