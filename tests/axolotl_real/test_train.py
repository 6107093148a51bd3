"""A whole run of axolotl with the plugin and the lines of docs/integrations/axolotl.md, and what it refuses."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from router_replay.errors import ConfigError
from router_replay.integrations.axolotl import TRAINER, RouterReplayPlugin, replay_arguments
from tests.trl_real import makers

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations" / "axolotl.md").read_text("utf-8")
(LINES,) = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
(ENGINE,) = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
ROLLOUTS = """
import pathlib

folder = str(pathlib.Path(__file__).with_name("model"))


def reward(completions, **_):
    return [len(text) % 3 / 3 for text in completions]


def as_prompt(cfg, **_):
    return lambda example, tokenizer=None: {"prompt": example["problem"]}, {"remove_columns": ["problem"]}


"""
OWN: dict[str, Any] = {
    "rl": "grpo",
    "trl": {"num_generations": 4, "max_completion_length": 6, "reward_funcs": ["rollouts.reward"], "beta": 0.0},
    "skip_prepare_dataset": True, "sequence_len": 64, "micro_batch_size": 8, "gradient_accumulation_steps": 1,
    "max_steps": 2, "num_epochs": 1, "learning_rate": 1e-2, "optimizer": "adamw_torch", "lr_scheduler": "constant",
    "logging_steps": 1, "save_strategy": "no", "bf16": False, "fp16": False, "tf32": False, "sdp_attention": True,
    "gradient_checkpointing": False, "val_set_size": 0, "special_tokens": {"pad_token": "<|pad|>"},
}  # fmt: skip


def run(folder: pathlib.Path) -> str:
    makers.model_folder(folder / "model")
    (folder / "rollouts.py").write_text(ROLLOUTS + ENGINE)
    problems = [json.dumps({"problem": f"{number}+{7 * number}="}) for number in range(3, 40)]
    (folder / "problems.jsonl").write_text("\n".join(problems))
    data = {"path": str(folder / "problems.jsonl"), "ds_type": "json", "type": "rollouts.as_prompt", "split": "train"}
    places = {"base_model": str(folder / "model"), "output_dir": str(folder / "out"), "datasets": [data]}
    places["dataset_prepared_path"] = str(folder / "prepared")
    (folder / "config.yml").write_text(LINES + yaml.safe_dump(OWN | places))
    variables = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", "config.yml"], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | variables | {"PYTHONPATH": paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_the_lines_of_the_page_replay_every_row(tmp_path: pathlib.Path) -> None:
    text = run(tmp_path)
    assert "[router_replay] r3 on RouterReplay(Qwen3MoeForCausalLM: 3 routers, 4 of 16 experts" in text
    steps = [ast.literal_eval(found) for found in re.findall(r"\{'loss'.+?\}", text)]
    assert len(steps) == 2
    for step in steps:
        assert float(step["routes/replayed"]) > 0
        assert float(step["routes/live"]) == 0
        assert float(step["mismatch/k3"]) < 1e-6  # both in float32; old weights would be far away in the second step
        assert float(step["routing/load"]) >= 1
        assert float(step["routes/agreement"]) > 0.99
    assert float(steps[0]["grad_norm"]) > 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rl": "dpo"}, "rl: dpo"),
        ({"trainer_cls": "mine.Trainer"}, "trainer_cls: mine.Trainer"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"trl": {"async_prefetch": True}}, "trl.async_prefetch"),
        ({"trl": {"use_data_producer": True}}, "trl.use_data_producer"),
        ({"batch_flattening": True}, "batch_flattening"),
    ],
)
def test_what_cannot_replay_is_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RouterReplayPlugin().register({"rl": "grpo", **changed})


def test_the_plugin_chooses_its_trainer() -> None:
    config = {"rl": "grpo"}
    RouterReplayPlugin().register(config)
    assert config["trainer_cls"] == TRAINER
    RouterReplayPlugin().register(config)  # axolotl may call it twice


def test_keys_become_arguments_of_the_trainer() -> None:
    assert replay_arguments({}) == {
        "replay": "r3", "engine": None, "on_missing": "raise", "seeded": True, "weights": "", "routing_metrics": True,
    }  # fmt: skip
    found = replay_arguments(yaml.safe_load("{router_replay: off, router_replay_engine: json.loads}"))
    assert (found["replay"], found["engine"]) == ("off", json.loads)


def test_an_engine_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_replay_engine: nowhere\.make must be the dotted name"):
        replay_arguments({"router_replay_engine": "nowhere.make"})
