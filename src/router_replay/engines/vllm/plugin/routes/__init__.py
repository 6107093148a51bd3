"""The rows of requests inside vLLM: forced, checked, and delivered."""
