"""Share all versions of the policy with vLLM on this machine through one segment of shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from router_replay.engines.vllm.weights import SharedWeights, checkpoint_tensors, share
from router_replay.errors import EngineError


class Segment:
    """Hold the segment for the weights of `model`. The first write creates it.

    It is not created if shared memory has no room for it: many containers have 64 MB.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: SharedWeights | None = None
        self._fits = True

    def write(self, state: Mapping[str, torch.Tensor]) -> SharedWeights | None:
        """Write these weights into the segment and return it, or None if they do not fit."""
        if not self._fits:
            return None
        tensors = checkpoint_tensors(self._model, state)
        if self._weights is not None:
            self._weights.write(tensors)
            return self._weights
        try:
            self._weights = share(tensors)
        except EngineError:
            self._fits = False
        return self._weights

    def close(self) -> None:
        """Remove the segment, if there is one."""
        if self._weights is not None:
            self._weights.close()
