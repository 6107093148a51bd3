"""New weights inside a vLLM worker."""
