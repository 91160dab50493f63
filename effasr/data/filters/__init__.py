"""Which utterances a run can train on."""
