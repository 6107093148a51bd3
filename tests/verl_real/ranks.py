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


def ulysses(model: str) -> dict[str, Any]:
    """Both ranks hold a half of every sequence. verl's Ulysses attention needs flash-attn, so here each half attends to
    itself: the numbers are not those of the whole, but rows and tokens must still belong together.
    """
    made = tiny.engine(model, "R2", "fsdp2", ulysses_sequence_parallel_size=2)
    data = tiny.batch_of(tiny.rollouts(), max_token_len_per_gpu=64).exclude("routed_experts")
    with made.eval_mode():
        token_S = torch.from_numpy(made._tokens_of_pass(data))
        inputs, _ = made.prepare_model_inputs(data)
    slots = inputs["input_ids"].reshape(-1)
    own = token_S >= 0
    assert torch.equal(slots[own], data["input_ids"].values()[token_S[own]])
    old = tiny.score(made, data)
    again = tiny.batch_of(tiny.rollouts(), max_token_len_per_gpu=64)
    again["routed_experts"] = old["routed_experts"]
    replaying = tiny.engine(model, "R3", "fsdp2", ulysses_sequence_parallel_size=2)
    new = tiny.score(replaying, again)
    shifted = tiny.batch_of(tiny.rollouts(), max_token_len_per_gpu=64)
    routes = old["routed_experts"]
    shifted["routed_experts"] = torch.nested.nested_tensor_from_jagged(routes.values().roll(1, 0), routes.offsets())
    return {
        "tokens": token_S,
        "routes": routes.values(),
        "log_probs": [one["log_probs"].values() for one in (old, new, tiny.score(replaying, shifted))],
        "replayed": new["metrics"]["routes/replayed"],
    }


def main(folder: pathlib.Path, rank: int) -> None:
    tiny.start(folder, rank, WORLD)
    model = str(folder / "model")
    found = {
        "fsdp, packed": run(model, rank, "fsdp"),
        "fsdp2, packed": run(model, rank, "fsdp2"),
        "fsdp2, padded": run(model, rank, "fsdp2", use_remove_padding=False),
    }
    found["ulysses"] = ulysses(model)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
