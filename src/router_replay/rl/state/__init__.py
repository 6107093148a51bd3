"""What a run keeps on disk: checkpoints, the record of its settings, and the lock of its folder."""
