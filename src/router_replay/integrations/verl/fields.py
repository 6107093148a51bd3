"""The routes of a micro-batch of verl, between its field `routed_experts` and Routes.

Shapes: T tokens of all sequences of a micro-batch, S slots of a forward pass (tokens and padding), A decoder layers,
L routed layers, K slots of a router.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

FIELD = "routed_experts"  # nested [sequences, tokens, A, K] of int16; row t belongs to token t; zeros are missing rows
PADDING = -1


@dataclasses.dataclass(frozen=True)
class MicroBatchRoutes:
    """The routes of the T tokens of a micro-batch.

    `routes` are the captured rows, and `row_T` says which of them belongs to each token, -1 if it has none. `loss_T`
    is True where the log-prob of the next token bears loss. `idle_T` is True for tokens that no loss depends on:
    those behind the last one that bears loss.
    """

    routes: Routes
    row_T: np.ndarray
    loss_T: np.ndarray
    idle_T: np.ndarray

    @classmethod
    def read(cls, micro_batch: Any, spec: RouterSpec) -> MicroBatchRoutes | None:
        """Read and check the fields of `micro_batch`, a TensorDict, for a model of `spec`; None without the field."""
        field = micro_batch.get(FIELD, None)
        if field is None:
            return None
        offsets = micro_batch["input_ids"].offsets().cpu().numpy()
        parts = [part.cpu().numpy() for part in field.unbind()]  # dense where all sequences have one length
        if [len(part) for part in parts] != np.diff(offsets).tolist():
            raise ReplayError(
                f"{FIELD} must have one row per token of each sequence: expected {np.diff(offsets).tolist()}, "
                f"got {[len(part) for part in parts]}"
            )
        ids_TAK = np.concatenate(parts)
        loss_T, idle_T = loss_rows(micro_batch, offsets)
        # No row repeats an expert, so a row of zeros is a missing one. With top_k 1 it can be real: verl leaves out
        # only rows at the end of a sequence.
        captured_T = ids_TAK.any(axis=(1, 2)) if spec.top_k > 1 else ~idle_T
        row_T = np.where(captured_T, np.cumsum(captured_T) - 1, PADDING)
        return cls(Routes.from_engine(ids_TAK[captured_T], spec), row_T, loss_T, idle_T)

    def of_pass(self, token_S: np.ndarray) -> tuple[Routes, np.ndarray, np.ndarray]:
        """Return the Routes, the loss mask and the idle mask of a pass whose slot s holds token `token_S[s]`, or -1."""
        # index -1 finds the entry that is appended for padding
        routes = self.routes.take(np.append(self.row_T, PADDING)[token_S])
        return routes, np.append(self.loss_T, False)[token_S], np.append(self.idle_T, True)[token_S]


def loss_rows(micro_batch: Any, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the masks of rows that bear loss, and of rows that no loss depends on, of the sequences at `offsets`.

    `response_mask` of `micro_batch` marks tokens of the response; the row before a marked token bears its loss.
    """
    mask = micro_batch["response_mask"]
    parts = [part.cpu().numpy().astype(bool) for part in mask.unbind()]
    attention = micro_batch.get("attention_mask", None)
    if not mask.is_nested and attention is not None and not attention.is_nested:  # responses padded on the right
        lengths = attention[:, -mask.shape[1] :].sum(1).tolist()
        parts = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    loss_T, idle_T = np.zeros(offsets[-1], bool), np.ones(offsets[-1], bool)
    for start, end, part in zip(offsets[:-1], offsets[1:], parts, strict=True):
        loss_T[end - 1 - len(part) : end - 1] = part
        last = start + 1 + np.flatnonzero(loss_T[start:end])[-1] if part.any() else start
        idle_T[start:last] = False
    return loss_T, idle_T


def over_all_layers(ids_SLK: Tensor, spec: RouterSpec) -> Tensor:
    """Return `ids_SLK` as verl's field has them: int16, with zeros for the decoder layers without router."""
    ids_SAK = ids_SLK.new_zeros((len(ids_SLK), width_of(spec), spec.top_k), dtype=torch.int16)
    ids_SAK[:, list(spec.layers)] = ids_SLK.to(torch.int16)
    return ids_SAK


def width_of(spec: RouterSpec) -> int:
    """Return A, the number of decoder layers of `spec`. Raises ReplayError if a layer has more than one router."""
    if len(set(spec.layers)) != len(spec.layers) or spec.num_layers is None:
        raise ReplayError(f"{FIELD} of verl has one column per decoder layer, and this model needs more: {spec}")
    return spec.num_layers
