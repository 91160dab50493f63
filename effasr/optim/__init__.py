"""Optimizers, schedules and averages of parameters."""
