"""Commands about the choice among alternatives."""
