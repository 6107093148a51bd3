"""The real axolotl on the CPU: make test-axolotl."""
