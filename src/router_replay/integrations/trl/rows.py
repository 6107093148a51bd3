"""Lay rows out as TRL lays tokens out, so that TRL shuffles and splits both alike.

    rows = BatchRows.laid_out([Laid(2, 3, routes)], width=4, length=3, spec=spec)    # prompt 2, completion 3 tokens
    rows.captured                                                                    # 0 0 1 1  1 1 0
    batch |= rows.as_batch()                                                         # two more tensors in TRL's dict

Prompts end at `width` and completions begin there. Shapes: B sequences, W slots each, L routed layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

IDS, CAPTURED = "routed_experts", "routed_experts_captured"


class Laid(NamedTuple):
    """The numbers of prompt and completion tokens of one sequence, and the rows of both."""

    prompt: int
    completion: int
    routes: Routes


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """The rows of padded sequences on the host: `ids` [B, W, L, K] in the narrow dtype, `captured` [B, W]."""

    ids: torch.Tensor
    captured: torch.Tensor

    @classmethod
    def laid_out(cls, sequences: Sequence[Laid], width: int, length: int, spec: RouterSpec) -> BatchRows:
        """Return the rows of `sequences` in slots of `width` prompt tokens and `length` completion tokens."""
        shape = (len(sequences), width + length)
        ids = np.zeros((*shape, len(spec.layers), spec.top_k), spec.dtype)
        captured = np.zeros(shape, bool)
        for number, (prompt, completion, routes) in enumerate(sequences):
            tokens = prompt + completion
            if prompt > width or completion > length or not tokens - 1 <= len(routes) <= tokens:
                raise ReplayError(
                    f"sequence {number}: {prompt} + {completion} tokens with {len(routes)} rows do not fit "
                    f"{width} + {length} slots: expected a row for each token, or for each but the last"
                )
            place = slice(width - prompt, width - prompt + len(routes))
            ids[number, place], captured[number, place] = routes.ids, routes.captured
        return cls(torch.from_numpy(ids), torch.from_numpy(captured))

    @classmethod
    def recorded(cls, ids: torch.Tensor) -> BatchRows:
        """Return the rows of a recorded pass, which has all of them: `ids` [B, W, L, K]."""
        return cls(ids, torch.ones(ids.shape[:2], dtype=torch.bool))

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> BatchRows | None:
        """Return the rows that ride in a batch dict of TRL, or None if it has none."""
        return cls(batch[IDS], batch[CAPTURED]) if IDS in batch else None

    def as_batch(self) -> dict[str, torch.Tensor]:
        """Return the two tensors for TRL's batch dict."""
        return {IDS: self.ids, CAPTURED: self.captured}

    def part(self, start: int, stop: int, spec: RouterSpec, device: torch.device) -> TensorRoutes:
        """Return the rows of sequences [start, stop), flat and on `device`, as a pass over them needs them."""
        captured = self.captured[start:stop].flatten()
        ids = self.ids[start:stop].flatten(0, 1)
        return TensorRoutes(
            ids.to(device), captured.to(device), spec, bool(captured.all()), any_captured=bool(captured.any())
        )

    def refuse_missing(self, attention_mask: torch.Tensor) -> None:
        """Raise ReplayError if a token that is attended to and predicts another one has no row."""
        missing = (predicts(attention_mask).cpu() & ~self.captured).nonzero()
        if len(missing):
            sequence, slot = missing[0].tolist()
            raise ReplayError(
                f"{len(missing)} rows are missing, the first in sequence {sequence}, slot {slot}: find out why the "
                'engine left them out, or pass on_missing="live" to route them live'
            )


def predicts(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return [B, W] True for each token that is attended to and has a next token: the rows that count."""
    attended = attention_mask.bool()
    following = torch.zeros_like(attended)
    following[:, :-1] = attended[:, 1:]
    return attended & following
