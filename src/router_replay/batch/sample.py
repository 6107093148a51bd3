"""Sample: one sequence on its way into a batch."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from router_replay.errors import BatchError
from router_replay.routes import Routes


class SampleLike(Protocol):
    """What `pack` needs of a sample; a Trajectory has all of it."""

    @property
    def token_ids(self) -> Any: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def loss_mask(self) -> Any: ...
    @property
    def routes(self) -> Routes | None: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sequence: entry i of each field speaks of token i; row i of `routes` is token i as an input.

    `advantages` is one number for the whole sequence or one per token. `routes` is None where
    nothing is to be replayed.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    routes: Routes | None
    advantages: np.ndarray | float = 0.0

    @classmethod
    def of(cls, source: SampleLike, advantages: Any = None, where: str = "sample") -> Sample:
        """A checked Sample from a Trajectory or anything shaped like one."""
        tokens = np.asarray(source.token_ids)
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens):
            raise BatchError(
                f"{where}: token_ids must be a flat array of token ids, got {tokens.dtype} {list(tokens.shape)}"
            )
        mask = _per_token(source.loss_mask, len(tokens), bool, f"{where}: loss_mask")
        logprobs = _per_token(source.logprobs, len(tokens), np.float32, f"{where}: logprobs")
        if advantages is None:
            advantages = getattr(source, "advantages", 0.0)
        advantages = np.broadcast_to(np.asarray(advantages, np.float32), np.shape(advantages) or len(tokens))
        advantages = _per_token(advantages, len(tokens), np.float32, f"{where}: advantages")
        routes = source.routes
        if routes is not None and len(routes) != len(tokens):
            raise BatchError(
                f"{where}: {len(tokens)} tokens but {len(routes)} rows; every token has a row, "
                "uncaptured where it is not known (Routes.missing)"
            )
        return cls(tokens.astype(np.int64, copy=False), logprobs, mask, routes, advantages)

    def __len__(self) -> int:
        return len(self.token_ids)

    def first_missing_loss_row(self) -> int | None:
        """The first row that predicts a token of the loss and was not captured; None where there is none.

        Row i computes the log-prob of token i + 1.
        """
        if self.routes is None or self.routes.all_captured:
            return None
        needed = self.loss_mask[1:] & ~self.routes.captured[:-1]
        return int(needed.argmax()) if needed.any() else None


def _per_token(values: Any, tokens: int, dtype: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (tokens,):
        raise BatchError(f"{name} must have one entry per token: expected [{tokens}], got {list(array.shape)}")
    return array.astype(dtype, copy=False)
