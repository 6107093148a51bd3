"""Run the training loop: the algorithm (sync), a run's state (run), the first rank (first_rank), failures (rescue)."""
