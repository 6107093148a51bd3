"""Lend the weights of all ranks to the first one, a tensor at a time.

    with lending(policy, ranks) as lent:             # all ranks; the others wait here and give their shards
        if lent is not None:                         # the first rank
            for name, tensor in lent.weights.items():
                ...                                  # a whole float32 tensor on the CPU, gathered now
            lent.moments["exp_avg"][name]            # the optimizer's, in the same way

The first rank reads in any order and as often as it likes. It never holds more than the tensors that it keeps itself,
so a model that fits on no single host can be written. If its work fails, the block ends and the others go on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from router_replay.engines.lazy_tensors import LazyTensors
from router_replay.rl.policy.base import MOMENTS, BasePolicy, Shards
from router_replay.rl.processes.ranks import Ranks

DONE = -1


class Lent:
    """What the first rank can read: the policy's `weights`, and the `moments` of its optimizer by their names.

    `steps` are the optimizer's steps of the weights that have moments.
    """

    def __init__(self, shards: Shards, ranks: Ranks) -> None:
        numbers = {key: number for number, key in enumerate(_keys(shards))}
        one_at_a_time = threading.Lock()  # engines may load in threads of their own

        # Not a method: what it reads would hold this object and it would hold them, until a garbage collection.
        def gather(moment: str, name: str) -> torch.Tensor:
            with one_at_a_time:
                _tell(numbers[moment, name], ranks)
                tensor = shards.gather(name, moment)
            assert tensor is not None
            return tensor

        self.steps = shards.steps
        self.weights = LazyTensors(shards.like, functools.partial(gather, ""))
        trained = {name: shards.like[name] for name in shards.steps}
        self.moments = {moment: LazyTensors(trained, functools.partial(gather, moment)) for moment in MOMENTS}


@contextlib.contextmanager
def lending(policy: BasePolicy, ranks: Ranks) -> Iterator[Lent | None]:
    """Lend the weights of `policy` to the first rank for the block. All ranks must enter it; the others get None.

    The others enter the block when the first rank leaves it.
    """
    shards = policy.shards()
    if ranks.is_first:
        try:
            yield Lent(shards, ranks)
        finally:
            _tell(DONE, ranks)
        return
    keys = _keys(shards)
    while (number := _heard()) != DONE:
        moment, name = keys[number]
        shards.gather(name, moment)
        ranks.watch.beat()
    yield None


def _keys(shards: Shards) -> list[tuple[str, str]]:
    return [(moment, name) for moment in ("", *MOMENTS) for name in shards.like]


def _tell(number: int, ranks: Ranks) -> None:
    if ranks.world > 1:
        dist.broadcast(torch.tensor(number), src=0)
        ranks.watch.beat()


def _heard() -> int:
    number = torch.tensor(0)
    dist.broadcast(number, src=0)
    return int(number)
