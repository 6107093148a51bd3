"""The training loop: the algorithm (sync), what a run holds (run), the first rank (first_rank), failures (rescue)."""
