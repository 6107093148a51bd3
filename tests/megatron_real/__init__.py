"""Tests with the real megatron-core on the CPU over gloo: `make test-megatron`."""
