"""The largest budgets that fit, found by a few short trials in processes of their own."""
