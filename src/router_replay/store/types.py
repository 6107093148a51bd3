"""What a RouteStore takes, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from router_replay.route_source import RouteSource
from router_replay.routes import Routes


class RequestLike(Protocol):
    """The attribute of a request that `add_completion` uses; `engines.Request` has it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""


class CompletionLike(Protocol):
    """The attributes of an answer that `add_completion` uses; `engines.Completion` has them."""

    @property
    def token_ids(self) -> np.ndarray:
        """The sampled tokens."""

    @property
    def routes(self) -> Routes:
        """The rows from `start` on."""

    @property
    def start(self) -> int:
        """The position of the first row."""


class TrajectoryLike(Protocol):
    """The attributes of a sequence that `add_trajectory` uses; Trajectory and Sample have them."""

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens of the sequence."""

    @property
    def loss_mask(self) -> np.ndarray:
        """True for each token that is part of the loss."""

    @property
    def routes(self) -> RouteSource | None:
        """One row per token, as Routes or where they are stored."""


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """Describes what the store has for a sequence of tokens.

    `routes` are the rows of the stored sequence from its first token on, and `tokens` is its number of tokens.
    `bears_loss[i]` says whether row i predicts a token of the loss; None means that every row does but the last.
    `ambiguous` says that another sample fits the same tokens and has other rows.
    """

    routes: Routes
    tokens: int
    bears_loss: np.ndarray | None
    ambiguous: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Nearest:
    """Describes the stored sequence nearest to another: its `tokens`, and how many first ones are `shared`."""

    tokens: np.ndarray
    shared: int
