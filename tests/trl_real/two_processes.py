"""One of two processes that train together; started by test_processes.py with torchrun.

The first one prints a line of JSON about both.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
from accelerate.utils import gather_object

from tests.trl_real import makers


def main(folder: str, output: str, replay: str) -> None:
    made = makers.trainer(
        folder, pathlib.Path(output), replay, engine=lambda: makers.Watched(folder), kind=makers.Losses,
        per_device_train_batch_size=makers.SEQUENCES // 4, ddp_backend="gloo", max_steps=4,
    )  # fmt: skip
    made.train()
    rows = [makers.rows_of(batch) for batch, _ in made.seen[:2]]  # of the first rollout
    sums = [float(sum(tensor.double().sum() for tensor in made.model.state_dict().values()))]
    about = {
        "gaps": gather_object([makers.gap(*made.seen[0])]),
        "sequences": gather_object([[row.tolist() for batch, _ in made.seen for row in batch["prompt_ids"]]]),
        "weights": gather_object(sums),
        "engines": gather_object([made.engine is not None]),
        "replayed": gather_object([made.replayer.stats.rows_replayed[0]]),
        "load": makers.imbalance(np.concatenate(gather_object(rows))).tolist(),
        "log": [entry for entry in made.state.log_history if "routes/live" in entry],
    }
    if made.accelerator.is_main_process:
        answers = made.engine.answers
        about["rows"] = sum(len(prompt) + len(one.token_ids) - 1 for prompt, one in answers[: makers.SEQUENCES])
        about["pushes"] = made.engine.pushes
        print("RESULT " + json.dumps(about), flush=True)  # noqa: T201
    made.close()
    del made  # before the process group: in the environment of axolotl its end hung afterwards
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
