"""Host code shared by all operations: dispatch, autograd and kernel launches."""
