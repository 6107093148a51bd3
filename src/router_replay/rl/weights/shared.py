"""One segment of shared memory for all versions of the policy, from which vLLM on this machine reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from router_replay.engines.vllm.weights import SharedWeights, checkpoint_tensors, share
from router_replay.errors import EngineError


class Segment:
    """Made when the first weights are written. Where shared memory has no room (a container's 64 MB), it stays away."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._weights: SharedWeights | None = None
        self._fits = True

    def write(self, state: Mapping[str, torch.Tensor]) -> SharedWeights | None:
        """The segment with these weights in it; None where it does not fit."""
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
        if self._weights is not None:
            self._weights.close()
