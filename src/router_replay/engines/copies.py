"""Joins copies of many small rectangles into few copies of large ones.

    joined([Move(View((2, 3), (3, 1), 0), View((2, 3), (3, 1), 0)),
            Move(View((2, 3), (3, 1), 6), View((2, 3), (3, 1), 12))])
    # one Move: shape (2, 2, 3), strides (6, 3, 1) and (12, 3, 1)

A checkpoint holds the matrices of each expert apart, trainers and engines hold those of all experts in one tensor. The
pieces lie at equal distances in both, so torch can copy all of them with one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch


@dataclasses.dataclass(frozen=True)
class View:
    """A rectangle of a tensor, as torch describes it: sizes, strides and where it begins, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return the place of `tensor` in its storage."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rectangle of `tensor`, which must have a storage of its own or begin at its place there."""
        return tensor.as_strided(self.shape, self.stride, self.offset + tensor.storage_offset())

    def moved(self, offset: int) -> View:
        """Return the same rectangle, `offset` elements further on."""
        return View(self.shape, self.stride, self.offset + offset)


@dataclasses.dataclass(frozen=True)
class Move:
    """A copy of the rectangle `given` of one memory to the rectangle `place`, of the same shape, of another."""

    given: View
    place: View

    def make(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from `source` to `target`, both seen as one row of elements from their beginning."""
        self.place.on(target).copy_(self.given.on(source), non_blocking=True)


def joined(moves: Iterable[Move]) -> list[Move]:
    """Return moves that copy the same elements to the same places, as few as neighbours at equal distances allow.

    The places must not overlap: the order of the moves changes.
    """
    alike: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = {}
    for move in moves:
        form = (move.given.shape, move.given.stride, move.place.stride)
        alike.setdefault(form, []).append((move.given.offset, move.place.offset))
    found: list[Move] = []
    while alike:
        (shape, given, place), starts = alike.popitem()
        for count, steps, (first, second) in _runs(sorted(starts)):
            if count == 1:
                found.append(Move(View(shape, given, first), View(shape, place, second)))
            else:  # these may be neighbours at equal distances too
                form = ((count, *shape), (steps[0], *given), (steps[1], *place))
                alike.setdefault(form, []).append((first, second))
    return found


def _runs(starts: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Return the runs of pairs at equal distances: their number, the distances, and the first pair."""
    found: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    at = 0
    while at < len(starts):
        end, steps = at + 1, (0, 0)
        if end < len(starts) and starts[end][1] > starts[at][1]:  # torch has no negative strides
            steps = _distance(starts[at], starts[end])
            while end < len(starts) and _distance(starts[end - 1], starts[end]) == steps:
                end += 1
        found.append((end - at, steps, starts[at]))
        at = end
    return found


def _distance(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return other[0] - one[0], other[1] - one[1]
