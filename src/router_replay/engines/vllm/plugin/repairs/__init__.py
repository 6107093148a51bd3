"""Repairs of faults in vLLM itself."""
