"""Stand where TRL expects the model in a pass: it cuts a batch into chunks and calls the model for each.

There the rows of the chunk are in force, or recorded, and the routers are measured.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from router_replay import RouterReplay
from router_replay.errors import ReplayError
from router_replay.integrations.trl.rows import BatchRows, predicts
from router_replay.replay.gauge import RouterGauge


class Chunks:
    """Calls `model` live for each chunk. `gauge` measures the routers of `replayer`; without it nothing is measured."""

    def __init__(self, replayer: RouterReplay, model: Any, gauge: RouterGauge | None) -> None:
        self._replayer, self._model, self._gauge = replayer, model, gauge

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Call the model with the `inputs` of the next chunk."""
        counted = predicts(inputs["attention_mask"]).flatten()
        with contextlib.nullcontext() if self._gauge is None else self._replayer.measure(self._gauge, counted):
            return self._run(inputs, counted)

    def _run(self, inputs: dict[str, Any], counted: torch.Tensor) -> Any:
        """Call the model; `counted` is True for the tokens that predict another one."""
        return self._model(**inputs)

    def rows(self, sequences: int) -> BatchRows | None:
        """Return the rows of a pass over `sequences` sequences: none, because it was live."""
        return None


class ReplayedChunks(Chunks):
    """Replays `rows` in the model; a checkpointed layer remembers them for its recompute in backward."""

    def __init__(
        self, replayer: RouterReplay, model: Any, gauge: RouterGauge | None, rows: BatchRows, *, agreement: bool
    ) -> None:
        super().__init__(replayer, model, gauge)
        self._rows, self._agreement, self._done = rows, agreement, 0

    def _run(self, inputs: dict[str, Any], counted: torch.Tensor) -> Any:
        tokens, start = inputs["input_ids"], self._done
        self._done += len(tokens)
        part = self._rows.part(start, self._done, self._replayer.spec, tokens.device)
        with self._replayer.replay(part, on_missing="live", idle=~counted, agreement=self._agreement):
            return self._model(**inputs)

    def rows(self, sequences: int) -> BatchRows:
        """Return the rows. Raises ReplayError unless they were those of `sequences` sequences."""
        if not self._done == sequences == len(self._rows.ids):
            raise ReplayError(
                f"a pass over {sequences} sequences called the model with {self._done}, and the batch has rows of "
                f"{len(self._rows.ids)}: expected three equal numbers"
            )
        return self._rows


class RecordedChunks(Chunks):
    """Records what the model chooses."""

    def __init__(self, replayer: RouterReplay, model: Any, gauge: RouterGauge | None) -> None:
        super().__init__(replayer, model, gauge)
        self._parts: list[torch.Tensor] = []

    def _run(self, inputs: dict[str, Any], counted: torch.Tensor) -> Any:
        with self._replayer.record() as recorded:
            out = self._model(**inputs)
        self._parts.append(recorded.tensors.ids.unflatten(0, inputs["input_ids"].shape).cpu())
        return out

    def rows(self, sequences: int) -> BatchRows:
        """Return the recorded rows of all chunks."""
        return BatchRows.recorded(torch.cat(self._parts))
