"""Play episodes with an engine, compare their rewards, and turn them into samples."""

from router_replay.rl.rollout.player import Episode, Player, seed_of
from router_replay.rl.rollout.rollout import Rollout

__all__ = ["Episode", "Player", "Rollout", "seed_of"]
