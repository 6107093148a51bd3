"""Let vLLM find its compiled code again if the same model lies in another folder.

The path of the model is part of the key under which vLLM keeps compiled code. A training run exports its weights to a
folder with a new name, and a checkpoint has a folder of its own, so vLLM would compile at every start. The model's
config is part of the key too, so the path of a local folder says nothing more about the code. It does if the folder
contains the code of the model (`trust_remote_code`); then the key stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from router_replay.engines.vllm.plugin import seams

ANY_FOLDER = "a local folder"


def install() -> None:
    """Wrap the method that makes the key, unless its seam does not fit."""
    if seams.problems("cache"):
        return
    from vllm.config import ModelConfig

    seams.wrap(ModelConfig, "compute_hash", without_folder)


def without_folder(original: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a replacement of `ModelConfig.compute_hash` that leaves out the path of a local folder."""

    def compute_hash(self: Any) -> str:
        if self.trust_remote_code or not os.path.isdir(self.model):
            return original(self)
        path, self.model = self.model, ANY_FOLDER
        try:
            return original(self)
        finally:
            self.model = path

    return compute_hash
