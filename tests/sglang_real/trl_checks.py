"""SGLang as the engine of TRL's GRPOTrainer; run by `make test-sglang` in the environment of TRL."""

from __future__ import annotations

import pathlib

from datasets import Dataset

from router_replay.engines.sglang import SglangEngine
from tests.sglang_real.conftest import Server, prompt
from tests.sglang_real.server_checks import Models, Say
from tests.trl_real import makers
from tests.trl_real.test_servers import MOVED, trained_on


def test_trl_trains_on_it(server: Server, models: Models, tmp_path: pathlib.Path, verified: Say) -> None:
    texts = [" ".join(f"w{token}" for token in prompt(seed, 4 + seed % 3)) for seed in range(64)]
    made = makers.trainer(
        str(models[0]),
        tmp_path,
        engine=lambda: SglangEngine(server.url, timeout=120),
        kind=makers.Losses,
        trainer_train_dataset=Dataset.from_dict({"prompt": texts}),
        trainer_seeded=False,  # this server has no deterministic inference
        **MOVED,
    )
    trained_on(made)
    made.close()
    verified("TRL: two rollouts of GRPOTrainer, each with the policy's weights; all rows replayed, none live")
