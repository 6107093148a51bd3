"""From the samples of a step to what each rank computes: mini-batches, their packed bins, and its own rows only.

The first rank holds the rollouts. It packs each mini-batch into bins, deals the bins out to the replicas, and sends
every rank its bins with the rows of its own slots alone, encoded by the wire. Tokens and masks of a bin go to all
ranks that share it: a loss over whole sequences needs them, and they are a few bytes a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from router_replay import wire
from router_replay.batch import Batch, Sample, pack
from router_replay.rl.ranks import Ranks
from router_replay.routes import Routes

WHOLE_SEQUENCES: Literal["contiguous"] = "contiguous"  # how Ulysses cuts a bin


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed bin: every slot of it, and the rows of the slots that this rank holds."""

    whole: Batch
    routes: Routes | None

    def local(self, ranks: Ranks) -> Batch:
        """This rank's slots with their rows."""
        mine = self.whole if ranks.ulysses == 1 else self.whole.shard(ranks.piece, ranks.ulysses, WHOLE_SEQUENCES)
        return dataclasses.replace(mine, routes=self.routes)


@dataclasses.dataclass(frozen=True, eq=False)
class MiniBatch:
    """One optimizer step: as many micro-batches on every rank, and what their sums are divided by."""

    micro: tuple[MicroBatch, ...]
    tokens: int
    sequences: int


def split(samples: Sequence[Sample], episodes: Sequence[int], parts: int, seed: Sequence[int]) -> list[list[Sample]]:
    """Deal whole episodes out to mini-batches, in an order drawn from `seed`; the trajectories of one stay together."""
    numbers = np.unique(np.asarray(episodes))
    shuffled = np.random.default_rng(np.random.SeedSequence(seed)).permutation(numbers)
    part_of = {int(number): position * parts // len(shuffled) for position, number in enumerate(shuffled)}
    dealt: list[list[Sample]] = [[] for _ in range(parts)]
    for sample, episode in zip(samples, episodes, strict=True):
        dealt[part_of[int(episode)]].append(sample)
    return dealt


def plan(
    parts: Sequence[Sequence[Sample]],
    ranks: Ranks,
    max_tokens: int,
    on_missing: Literal["raise", "live"],
    one_at_a_time: bool = False,
) -> list[list[MiniBatch]]:
    """For every rank, its mini-batches. `one_at_a_time` is for models that cannot keep packed sequences apart."""
    plans: list[list[MiniBatch]] = [[] for _ in range(ranks.world)]
    for samples in parts:
        shares = [[sample] for sample in samples] if one_at_a_time else [samples]
        batches = [pack(share, max_tokens, ranks.ulysses, on_missing=on_missing) for share in shares]
        tokens = sum(int(batch.label_mask.sum()) for batch in batches)
        bins = [one for batch in batches for one in batch.bins()]
        while len(bins) % ranks.replicas:
            bins.append(_without_loss(bins[-1]))  # FSDP2 needs as many passes on every rank
        for rank, mine in enumerate(plans):
            replica, piece = divmod(rank, ranks.ulysses)
            micro = tuple(_of_rank(whole, piece, ranks.ulysses) for whole in bins[replica :: ranks.replicas])
            mine.append(MiniBatch(micro, tokens, len(samples)))
    return plans


def deliver(plans: list[list[MiniBatch]] | None, ranks: Ranks) -> list[MiniBatch]:
    """This rank's share. Only the first rank has plans to give."""
    if ranks.world == 1:
        assert plans is not None
        return plans[0]
    sent = ranks.scatter(None if plans is None else [[_packed(mini) for mini in mine] for mine in plans])
    return [_unpacked(mini) for mini in sent]


def _without_loss(whole: Batch) -> Batch:
    nothing = np.zeros(len(whole), bool)
    return dataclasses.replace(whole, loss_mask=nothing, label_mask=nothing)


def _of_rank(whole: Batch, piece: int, size: int) -> MicroBatch:
    routes = whole.routes
    if routes is not None and size > 1:
        routes = whole.shard(piece, size, WHOLE_SEQUENCES).routes
    return MicroBatch(dataclasses.replace(whole, routes=None), routes)


def _packed(mini: MiniBatch) -> tuple[Any, ...]:
    micro = [(one.whole, None if one.routes is None else wire.encode(one.routes, codec="dense")) for one in mini.micro]
    return micro, mini.tokens, mini.sequences


def _unpacked(sent: tuple[Any, ...]) -> MiniBatch:
    micro, tokens, sequences = sent
    pairs = [MicroBatch(whole, None if blob is None else wire.decode(blob)) for whole, blob in micro]
    return MiniBatch(tuple(pairs), tokens, sequences)
