"""What all operations share on the host: dispatch, autograd, launches."""
