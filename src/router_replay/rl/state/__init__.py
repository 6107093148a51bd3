"""Keep a run's state on disk: checkpoints, the record of its settings, and the lock of its folder."""
