"""The real verl on the CPU, over gloo: make test-verl."""
