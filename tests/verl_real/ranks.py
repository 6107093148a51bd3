"""One of two processes over gloo, each with half of the samples: python -m tests.verl_real.ranks FOLDER RANK."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from tests.verl_real import tiny

# isort: split
import torch

WORLD = 2


def run(model: str, rank: int, strategy: str, **settings: Any) -> dict[str, Any]:
    outputs = tiny.rollouts()[rank::WORLD]
    layout = {"use_remove_padding": settings.get("use_remove_padding", True)}
    metrics, gradients = tiny.train(tiny.engine(model, "R3", strategy, **settings), tiny.batch_of(outputs, **layout))
    scored = tiny.score(tiny.engine(model, "R3", strategy, **settings), tiny.batch_of(outputs, **layout))
    recording = tiny.engine(model, "R2", strategy, **settings)
    old = tiny.score(recording, tiny.batch_of(outputs, **layout).exclude("routed_experts"))
    again = tiny.batch_of(outputs, **layout)
    again["routed_experts"] = old["routed_experts"]
    new = tiny.score(tiny.engine(model, "R3", strategy, **settings), again)
    return {
        "log_probs": [line.clone() for line in scored["log_probs"].unbind()],
        "metrics": metrics,
        "gradients": gradients,
        "recorded and replayed": [old["log_probs"].values(), new["log_probs"].values()],
    }


def main(folder: pathlib.Path, rank: int) -> None:
    tiny.start(folder, rank, WORLD)
    model = str(folder / "model")
    found = {
        "fsdp, packed": run(model, rank, "fsdp"),
        "fsdp2, packed": run(model, rank, "fsdp2"),
        "fsdp2, padded": run(model, rank, "fsdp2", use_remove_padding=False),
    }
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
