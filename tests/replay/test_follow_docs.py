"""The code of docs/integrations/any_loop.md runs as it stands there, with the real Trainer of transformers."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from router_replay import RouterReplay, RouterSpec
from router_replay.engines import Completion, Request
from router_replay.replay.follow import Following
from router_replay.store import RouteStore
from tests.makers import random_routes
from tests.replay import tiny

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "integrations" / "any_loop.md"


def rollouts_of(spec: RouterSpec, seed: int = 0, count: int = 8) -> list[tuple[Request, Completion]]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        request = Request([3, 4, 10 + number])
        tokens = rng.integers(1, tiny.VOCAB, 3 + number % 4)
        routes = random_routes(2 + len(tokens), spec, seed + number)
        zeros = np.zeros(len(tokens), np.int64)
        found.append((request, Completion(request.id, 0, tokens, zeros * 0.0, routes, 0, "stop", zeros)))
    return found


def collated(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the left, as many data collators do."""
    width = max(len(one["tokens"]) for one in samples)
    rows = [[0] * (width - len(one["tokens"])) + one["tokens"] for one in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def trainer_of(rollouts: list[tuple[Request, Completion]], folder: pathlib.Path) -> Trainer:
    data = [{"tokens": [*request.token_ids, *completion.token_ids.tolist()]} for request, completion in rollouts]
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1,
        gradient_checkpointing=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model: Any = tiny.make("qwen3_moe").model
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=collated)


def test_the_code_of_the_page_runs(tmp_path: pathlib.Path) -> None:
    whole, steps, keyed = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    spec = RouterSpec.from_config(tiny.make("qwen3_moe").model.config)
    rollouts = rollouts_of(spec)
    rows = sum(len(completion.routes) for _, completion in rollouts)
    trainer, printed = trainer_of(rollouts, tmp_path), []
    names: dict[str, Any] = {"trainer": trainer, "rollouts": rollouts, "print": printed.append}
    exec(whole, names)
    assert (printed[0]["routes/replayed"], printed[0]["routes/live"]) == (rows, 0)
    assert printed[0]["routes/passes_followed"] == 4  # recomputed layers are no passes of their own

    replayer: RouterReplay = names["replayer"]
    model, logged = trainer.model, []

    def rollout(step: int) -> list[tuple[Request, Completion]]:
        names["now"] = rollouts_of(spec, seed=100 * step, count=4)
        return names["now"]

    def train(step: int) -> None:
        for request, completion in names["now"]:
            tokens = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
            model(input_ids=tokens, labels=tokens).loss.backward()

    exec(steps, names | {"steps": 2, "rollout": rollout, "train": train, "log": logged.append})
    assert [one["routes/passes_followed"] for one in logged] == [4, 8]
    assert [one["routes/live"] for one in logged] == [0, 0]

    request, completion = rollouts[0]
    store = RouteStore(spec)
    store.add_completion(request, completion, key="another")
    inputs = {"input_ids": torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])}
    inputs["labels"] = inputs["input_ids"]
    later = Completion(**{**vars(completion), "routes": random_routes(len(completion.routes), spec, 99)})
    following: Following = replayer.follow(store)
    given = {"store": store, "following": following, "model": model, "inputs": inputs, "sample_id": 7}
    with following, replayer.record() as recorded:
        exec(keyed, given | {"request": request, "completion": later})
    assert following.metrics()["routes/ambiguous"] == 0
    assert np.array_equal(recorded.routes.ids[:-1], later.routes.ids)
