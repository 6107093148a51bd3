"""Sample: one sequence that can be packed into a batch."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from router_replay.arguments import as_array, float32_array, int64_array, refuse_not_finite
from router_replay.errors import BatchError
from router_replay.route_source import RouteSource


class SampleLike(Protocol):
    """The attributes of a sample that `pack` uses; a Trajectory has all of them."""

    @property
    def token_ids(self) -> Any:
        """The tokens of the sequence."""

    @property
    def logprobs(self) -> Any:
        """The rollout engine's log-prob of each token."""

    @property
    def loss_mask(self) -> Any:
        """True for each token that is part of the loss."""

    @property
    def routes(self) -> RouteSource | None:
        """One row per token, as Routes or where they are stored; or None."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sequence: entry i of each field describes token i; row i of `routes` is token i as an input.

    `token_ids` are integers. `logprobs` are the rollout engine's log-probs, finite where `loss_mask` is True.
    `loss_mask` is True for the tokens of the loss. `routes` are Routes, or another RouteSource if the rows lie
    elsewhere; None if nothing is to be replayed. `advantages` is one number for the whole sequence or one per token.
    `versions` is the policy version that sampled each token, in the same two forms; it has no meaning where
    `loss_mask` is False.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    routes: RouteSource | None
    advantages: np.ndarray | float = 0.0
    versions: np.ndarray | int = 0

    @classmethod
    def of(cls, source: SampleLike, advantages: Any = None, where: str = "sample") -> Sample:
        """Make a checked Sample from `source`, a Trajectory or any object with the same attributes.

        `advantages` is one number or one per token; by default the attribute of `source`, or 0. `where` names the
        sample in error messages. Raises BatchError if a field is invalid.
        """
        tokens = int64_array(source.token_ids, f"{where}: token_ids", BatchError)
        if not len(tokens):
            raise BatchError(f"{where}: token_ids is empty: a sample needs at least one token")
        mask = _mask(source.loss_mask, len(tokens), f"{where}: loss_mask")
        logprobs = _per_token(source.logprobs, len(tokens), f"{where}: logprobs")
        refuse_not_finite(logprobs, f"{where}: logprobs of tokens that bear loss", BatchError, mask)
        if advantages is None:
            advantages = getattr(source, "advantages", 0.0)
        advantages = as_array(advantages, f"{where}: advantages", BatchError)
        advantages = np.broadcast_to(advantages, advantages.shape or len(tokens))
        advantages = _per_token(advantages, len(tokens), f"{where}: advantages")
        refuse_not_finite(advantages, f"{where}: advantages", BatchError)
        routes = source.routes
        if routes is not None and not isinstance(routes, RouteSource):
            raise BatchError(f"{where}: routes must be a Routes or None, got {type(routes).__name__}")
        if routes is not None and len(routes) != len(tokens):
            raise BatchError(
                f"{where}: routes must have one row per token: expected {len(tokens)}, got {len(routes)}; "
                "use Routes.missing for rows that are not known"
            )
        versions = as_array(getattr(source, "versions", 0), f"{where}: versions", BatchError)
        versions = np.broadcast_to(versions, versions.shape or len(tokens))
        versions = int64_array(versions, f"{where}: versions", BatchError)
        versions = _of_length(versions, len(tokens), f"{where}: versions")
        return cls(tokens, logprobs, mask, routes, advantages, versions)

    def __len__(self) -> int:
        return len(self.token_ids)

    def first_missing_loss_row(self) -> int | None:
        """Return the first uncaptured row that predicts a token of the loss; None if there is none.

        Row i computes the log-prob of token i + 1.
        """
        if self.routes is None or self.routes.all_captured:
            return None
        missing = missing_rows(self.routes.captured[:-1], self.loss_mask[1:])
        return int(missing[0]) if len(missing) else None


def missing_rows(captured: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Return the uncaptured rows that the loss needs. `needed[i]` says whether row i predicts a token with loss."""
    return np.flatnonzero(needed.astype(bool) & ~captured)


def _per_token(values: Any, tokens: int, name: str) -> np.ndarray:
    return _of_length(float32_array(values, name, BatchError), tokens, name)


def _mask(values: Any, tokens: int, name: str) -> np.ndarray:
    """Convert booleans, or the numbers 0 and 1, to a mask; a weight such as 0.5 is refused: it would count as 1."""
    array = _of_length(as_array(values, name, BatchError), tokens, name)
    if array.dtype == bool:
        return array
    odd = (array != 0) & (array != 1) if array.dtype.kind in "fui" else np.ones(tokens, bool)
    if np.any(odd):
        position = int(np.argmax(odd))
        raise BatchError(f"{name} must be booleans, or 0 and 1, got {array[position]!s} at position {position}")
    return array.astype(bool)


def _of_length(array: np.ndarray, tokens: int, name: str) -> np.ndarray:
    if array.shape != (tokens,):
        raise BatchError(f"{name} must have one entry per token: expected [{tokens}], got {list(array.shape)}")
    return array
