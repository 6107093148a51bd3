"""One sequence as bytes: tokens, log-probs, loss mask, versions and routes. Journal and trajectory files hold these."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np

from router_replay import wire
from router_replay.batch import Sample
from router_replay.spec import RouterSpec


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """Hold the arrays of a sequence as little-endian bytes, in msgpack an array of these five in order.

    `token_ids` and `versions` are int64, `logprobs` float32, and `loss_mask` has one byte per token, 0 or 1. `routes`
    is a blob of `wire.encode` with the digest of the tokens, in the codec `dense`, which keeps the order of the slots;
    it is empty if there are no routes.
    """

    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    versions: bytes
    routes: bytes

    @classmethod
    def of(cls, source: Any) -> Self:
        """Make it from `source`, a Trajectory, a Sample or a similar object. Raises BatchError if a field is wrong."""
        return cls.of_checked(Sample.of(source))

    @classmethod
    def of_checked(cls, source: Any) -> Self:
        """Make it from `source`, a Trajectory, or a Sample with one version per token that was checked before."""
        tokens, routes = source.token_ids, source.routes
        return cls(
            np.asarray(tokens, "<i8").tobytes(),
            np.asarray(source.logprobs, "<f4").tobytes(),
            np.asarray(source.loss_mask, "|b1").tobytes(),
            np.asarray(source.versions, "<i8").tobytes(),
            b"" if routes is None else wire.encode(routes.read(), codec="dense", token_ids=tokens),
        )

    def sample(self, spec: RouterSpec | None = None) -> Sample:
        """Return the sequence as a checked Sample. Raises an error if its parts do not fit together.

        `spec` is that of the model, if it is known; other routes are then refused.
        """
        tokens = np.frombuffer(self.token_ids, "<i8")
        routes = wire.decode(self.routes, token_ids=tokens, spec=spec) if self.routes else None
        return Sample.of(
            Sample(
                tokens,
                np.frombuffer(self.logprobs, "<f4"),
                np.frombuffer(self.loss_mask, "|b1"),
                routes,
                versions=np.frombuffer(self.versions, "<i8"),
            )
        )
