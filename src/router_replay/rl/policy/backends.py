"""Choose the policy of a run: the library that runs its model (`trainer.backend`)."""

from __future__ import annotations

import pathlib

from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.base import BasePolicy
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks


def make_policy(config: TrainConfig, ranks: Ranks, folder: pathlib.Path) -> BasePolicy:
    """Return the policy of `config` on this rank, with the weights of `folder`. All ranks must call it together."""
    if config.trainer.backend == "megatron":
        from router_replay.rl.policy.megatron.policy import MegatronPolicy  # megatron-core is optional

        return MegatronPolicy(config, ranks, folder)
    return Policy(config, ranks, folder)
