"""Runs vLLM in this process, or connects to a vLLM server by URL."""
