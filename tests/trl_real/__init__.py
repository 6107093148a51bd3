"""Tests with the real TRL on the CPU: `make test-trl`."""
