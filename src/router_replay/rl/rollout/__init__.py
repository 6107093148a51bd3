"""Play episodes with an engine, compare their rewards, and turn them into samples."""

from router_replay.rl.rollout.rollout import Episode, Rollout, seed_of

__all__ = ["Episode", "Rollout", "seed_of"]
