"""The layout of context parallelism against megatron's own function; its attention needs Transformer Engine."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import numpy as np
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from router_replay.batch.megatron import MegatronLayout
from router_replay.errors import ReplayError
from router_replay.replay.megatron.recorded import refuse_unknown_boundaries
from tests.megatron_real import tiny


@pytest.fixture(autouse=True)
def one_process() -> None:
    tiny.start()  # without a process group megatron takes every group for one rank


class Group:
    """A process group of which only the size and the rank are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.own, self.all = rank, size

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.all


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequences", [1, 3])
def test_zigzag_is_the_order_of_megatron(size: int, sequences: int) -> None:
    tokens = torch.arange(sequences * 16).view(sequences, 16)
    for rank in range(size):
        local = get_batch_on_this_cp_rank({"tokens": tokens}, Group(rank, size))["tokens"]
        layout = MegatronLayout((0,), context_part=rank, context_parts=size)
        assert layout.index(tokens.numel(), sequences).tolist() == local.T.flatten().tolist()  # hidden states: [s, b]


@pytest.mark.parametrize("size", [2, 4])
def test_packed_sequences_are_cut_as_megatron_cuts_each_alone(size: int) -> None:
    """megatron's function for packed sequences calls Transformer Engine, which cuts each sequence in the same way."""
    boundaries = np.array([0, 16, 24, 56])
    for rank in range(size):
        parts = [torch.arange(a, b)[None] for a, b in itertools.pairwise(boundaries)]
        local = [get_batch_on_this_cp_rank({"tokens": part}, Group(rank, size))["tokens"] for part in parts]
        layout = MegatronLayout((0,), context_part=rank, context_parts=size)
        assert layout.index(56, boundaries=boundaries).tolist() == torch.cat(local, 1).flatten().tolist()


def test_packed_sequences_without_their_boundaries_are_refused() -> None:
    layout = MegatronLayout((0,), context_part=1, context_parts=2)
    with pytest.raises(ReplayError, match="their boundaries are not known"):
        refuse_unknown_boundaries(layout, 1, None)
    refuse_unknown_boundaries(layout, 1, np.array([0, 16]))
    refuse_unknown_boundaries(layout, 2, None)
