"""The loop that drives all of it: environments, rollouts, losses, weight sync, checkpoints."""
