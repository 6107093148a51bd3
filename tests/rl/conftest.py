"""A small random model, problems with a reward that it can move, and configs over both."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from router_replay.rl.config import TrainConfig, load_config


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Of the tiny model's kind, with three layers and no warm start."""
    from transformers import Qwen3MoeForCausalLM

    from router_replay.recipes.tiny.model import make_config, make_tokenizer, recipe_for

    folder = tmp_path_factory.mktemp("models") / "random"
    config = make_config(recipe_for("tiny"))
    config.num_hidden_layers, config.num_experts, config.num_experts_per_tok = 3, 16, 4
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("data") / "problems.jsonl"
    lines = [json.dumps({"prompt": f"{number + 10}+{number + 20}=", "answer": ""}) for number in range(12)]
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def settings(random_model: pathlib.Path, problems: pathlib.Path, tmp_path: pathlib.Path) -> list[str]:
    return settings_of(random_model, problems, tmp_path / "run")


def settings_of(random_model: pathlib.Path, problems: pathlib.Path, output: pathlib.Path) -> list[str]:
    """As --set takes them: two small steps in float32 with the embedded engine."""
    return [
        f"output={output}", f"model.path={random_model}", "steps=2", "engine.kind=embedded",
        "engine.dtype=float32", "environment.kind=jsonl", f"environment.file={problems}",
        "environment.reward=tests.rl.rewards:sevens", "rollout.prompts=3", "rollout.group=4", "rollout.max_tokens=6",
        "trainer.max_tokens=64", "engine.max_length=64", "optimizer.lr=1e-3", "logging.tensorboard=false",
    ]  # fmt: skip


@pytest.fixture
def make_config(settings: list[str]) -> Callable[..., TrainConfig]:
    return lambda *more: load_config(None, [*settings, *more])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two processes are compared with one: sums must be taken in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
