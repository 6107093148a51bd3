"""Keep the trajectories of one batch of TRL, and find them again by their tokens.

    sequences = Sequences(spec)
    [trajectory] = sequences.of_prompts([[5, 6, 7]])          # a new one
    sequences.add(trajectory, [5, 6, 7], completion)          # 8, 9
    [same] = sequences.of_prompts([[5, 6, 7, 8, 9, 1]])       # a tool answered 1: the same trajectory
    sequences.take([5, 6, 7, 8, 9, 1, 2])                     # its rows

TRL gives its generation backend prompts only: it does not say which sequence a prompt continues. Sequences with equal
tokens are continued in the order in which they were sampled, which is TRL's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router_replay.engines.types import Completion, Request
from router_replay.errors import StitchError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.stitch import Trajectory


class Sequences:
    """Holds the trajectories of a batch, of a model with the routers of `spec`, by their tokens so far."""

    def __init__(self, spec: RouterSpec) -> None:
        self._spec = spec
        self._open: dict[bytes, list[Trajectory]] = {}

    def clear(self) -> None:
        """Forget all trajectories: a new batch begins."""
        self._open.clear()

    def of_prompts(self, prompts: Sequence[Sequence[int]]) -> list[Trajectory]:
        """Return the trajectory that each of the `prompts` continues, the longest one, or a new one."""
        lengths = sorted({len(key) for key in self._open}, reverse=True)
        found = []
        for prompt in prompts:
            tokens = _key(prompt)
            known = next((tokens[:n] for n in lengths if self._open.get(tokens[:n])), None)
            found.append(Trajectory(self._spec) if known is None else self._open[known].pop(0))
        return found

    def add(self, trajectory: Trajectory, prompt: Sequence[int], completion: Completion) -> None:
        """Add the answer `completion` to `prompt` to a `trajectory` that `of_prompts` returned."""
        trajectory.add(Request(prompt), completion)
        self._open.setdefault(_key(trajectory.token_ids), []).append(trajectory)

    def take(self, token_ids: Sequence[int]) -> Routes:
        """Return the rows of a finished sequence and forget it. TRL may have cut its end off.

        Raises StitchError if no trajectory begins with these tokens.
        """
        wanted = _key(token_ids)
        for key in (wanted, *self._open):
            if key.startswith(wanted) and self._open.get(key):
                return self._open[key].pop(0).routes[: len(token_ids)]
        raise StitchError(
            f"no rollout of this batch begins with these {len(token_ids)} tokens: expected the tokens that the engine "
            "sampled, unchanged"
        )


def _key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()
