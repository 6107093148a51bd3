"""Load new weights inside a vLLM worker."""
