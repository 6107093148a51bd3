"""vLLM: in this process, or a server by its URL."""
