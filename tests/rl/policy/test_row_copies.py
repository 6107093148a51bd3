"""What bench.train prints of the copies of a row."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch

from bench.train import row_copies
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks
from tests.rl.policy.test_policy import samples


def test_a_row_is_copied_by_pack_into_one_tensor_and_by_the_scoring_pass(
    make_config: Callable[..., TrainConfig], random_model: pathlib.Path
) -> None:
    policy = Policy(make_config("replay=r3"), Ranks(0, 1, 1, torch.device("cpu")), random_model)
    assert row_copies(samples(policy), policy, 16) == ["pack", "tensor", "scoring pass"]
