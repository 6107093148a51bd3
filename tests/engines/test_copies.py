"""Copies of many rectangles that are joined into few: the same elements arrive at the same places."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router_replay.engines.copies import Move, View, joined
from router_replay.engines.pieces import Piece, moves_of
from router_replay.engines.vllm.weights import SharedWeights
from router_replay.errors import EngineError


def flat(length: int, offset: int) -> View:
    return View((length,), (1,), offset)


def copied(moves: list[Move], source: torch.Tensor, length: int) -> torch.Tensor:
    target = torch.full((length,), -1)
    for move in moves:
        move.make(source, target)
    return target


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_joined_copies_move_what_the_single_ones_move(lengths: list[int], random: object) -> None:
    """Rectangles of several sizes, in any order, at any distances."""
    gaps, order = [random.choice([0, 0, 0, 1]) for _ in lengths], list(range(len(lengths)))  # type: ignore[attr-defined]
    random.shuffle(order)  # type: ignore[attr-defined]
    given_at = [sum(lengths[:number]) for number in range(len(lengths))]
    place_at, end = dict[int, int](), 0
    for number in order if random.random() < 0.5 else sorted(order):  # type: ignore[attr-defined]
        place_at[number], end = end, end + lengths[number] + gaps[number]
    moves = [Move(flat(n, given_at[i]), flat(n, place_at[i])) for i, n in enumerate(lengths)]
    source = torch.arange(sum(lengths))
    assert len(joined(moves)) <= len(moves)
    assert torch.equal(copied(joined(moves), source, end), copied(moves, source, end))


EXPERTS, ROWS, COLUMNS = 5, 4, 8  # 4 x 8 float32 are two lines of 64 bytes, so the pieces lie without gaps


def halves(columns: int = COLUMNS) -> tuple[torch.Tensor, list[Piece]]:
    """The gates and ups of all experts, in one tensor."""
    tensor = torch.randn(EXPERTS, 2 * ROWS, columns)
    pieces = [
        Piece(f"{e}.{name}", "fused", (slice(e, e + 1), slice(at, at + ROWS), slice(0, columns)), (ROWS, columns))
        for e in range(EXPERTS)
        for name, at in (("gate", 0), ("up", ROWS))
    ]
    return tensor, pieces


def test_pieces_that_lie_as_in_the_model_are_one_copy() -> None:
    tensor, pieces = halves()
    offsets = {piece.name: number * ROWS * COLUMNS for number, piece in enumerate(pieces)}
    assert len(moves_of(pieces, tensor.shape, offsets)) == 1


@pytest.mark.parametrize("columns", [COLUMNS, 5])  # 5: the memory has gaps between the pieces
@pytest.mark.parametrize("by_kind", [False, True])  # all gates come first
def test_shared_memory_has_the_bits_of_each_piece(columns: int, by_kind: bool) -> None:
    tensor, pieces = halves(columns)
    order = sorted(pieces, key=lambda piece: piece.name.partition(".")[2]) if by_kind else pieces
    with SharedWeights({piece.name: torch.empty(piece.shape, device="meta") for piece in order}) as shared:
        for scale in (1.0, 2.0):
            assert shared.write_pieces(pieces, {"fused": tensor * scale}) == 1
            for piece in pieces:
                assert torch.equal(read(shared, piece.name), piece.of(tensor * scale))


def test_a_piece_of_another_shape_is_refused() -> None:
    tensor, pieces = halves()
    with (
        SharedWeights({piece.name: torch.empty(3, device="meta") for piece in pieces}) as shared,
        pytest.raises(EngineError, match=r"0\.gate has shape \[4, 8\], expected \[3\]"),
    ):
        shared.write_pieces(pieces, {"fused": tensor})


def read(shared: SharedWeights, name: str) -> torch.Tensor:
    from router_replay.engines.vllm.plugin.weights.sources import open_source

    return open_source(shared.info()).read(name)
