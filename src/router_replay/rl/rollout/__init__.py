"""From problems to samples: play episodes with an engine, compare their rewards, and make samples of them."""

from router_replay.rl.rollout.rollout import Episode, Rollout, seed_of

__all__ = ["Episode", "Rollout", "seed_of"]
