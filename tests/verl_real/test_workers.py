"""verl's own worker, made from verl's own config with the settings of docs/integrations/verl.md."""

from __future__ import annotations

import pathlib
import re
import shlex
from typing import Any

import pytest

from tests.verl_real import tiny

# isort: split
import verl
from hydra import compose, initialize_config_dir
from verl.utils.config import validate_config
from verl.utils.metric import reduce_metrics
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.verl_real.test_engine import CLOSE, ROWS, largest, next_token_logprobs

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "integrations" / "verl.md"
(COMMAND,) = re.findall(r"^```\n(.+?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
CAPTURE = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
R2 = {CAPTURE: CAPTURE.replace("True", "False"), ".mode=R3": ".mode=R2"}
OWN = [  # what a user adds; here a tiny model on the CPU
    "actor_rollout_ref.model.path=MODEL",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "+actor_rollout_ref.model.load_tokenizer=False",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.total_training_steps=9",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=4",
    "trainer.n_gpus_per_node=1",
]


def settings(command: str, model: str) -> list[str]:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    return words[3:] + [word.replace("MODEL", model) for word in OWN]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def config_of(command: str, model: str, *more: str) -> Any:
    with initialize_config_dir(str(pathlib.Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", [*settings(command, model), *more])


def worker_of(config: Any) -> Any:
    validate_config(config, use_reference_policy=False, use_critic=False)
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def update(worker: Any, data: Any) -> dict[str, Any]:
    """verl's `_update_actor`: two mini-batches; the metrics as verl logs them."""
    tiny.tu.assign_non_tensor(
        data, calculate_entropy=True, global_batch_size=2, mini_batch_size=2, epochs=1, seed=1, compute_loss=True,
        dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    return reduce_metrics(tiny.tu.get(worker.update_actor(data), "metrics"))


def old_pass(worker: Any, data: Any) -> dict[str, Any]:
    tiny.tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    return dict(worker.compute_log_prob(data).items())


@pytest.mark.usefixtures("environment")
def test_the_command_of_the_page_replays_the_rollout(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    worker = worker_of(
        config_of(COMMAND, model, "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32")
    )
    assert "[router_replay] R3 on RouterReplay(" in capfd.readouterr().out
    outputs = tiny.rollouts()
    expected, _ = tiny.ours(model, outputs)
    old = old_pass(worker, tiny.batch_of(outputs))
    assert largest(next_token_logprobs(old), expected) < CLOSE
    assert "routed_experts" not in old

    data = tiny.batch_of(outputs)
    data["old_log_probs"] = tiny.response_from_nested(old["log_probs"], data["response_mask"])
    metrics = update(worker, data)
    assert metrics["routes/replayed"] == ROWS / 2  # the mean of two mini-batches
    assert metrics["routes/live"] == 0
    assert metrics["grad_norm"] > 0


@pytest.mark.usefixtures("environment")
def test_r2_goes_through_the_workers(model: str) -> None:
    command = COMMAND
    for before, after in R2.items():
        assert before in command
        command = command.replace(before, after)
    worker = worker_of(config_of(command, model))
    old = old_pass(worker, tiny.batch_of(tiny.rollouts()).exclude("routed_experts"))
    data = tiny.batch_of(tiny.rollouts())
    data["routed_experts"] = old["routed_experts"]
    data["old_log_probs"] = tiny.response_from_nested(old["log_probs"], data["response_mask"])
    tiny.tu.assign_non_tensor(
        data, calculate_entropy=False, global_batch_size=4, mini_batch_size=4, epochs=2, seed=1, compute_loss=True,
        dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    metrics = tiny.tu.get(worker.update_actor(data), "metrics")
    assert metrics["routes/replayed"] == [ROWS + 4, ROWS + 4]
    assert metrics["routes/live"] == [0, 0]
    first, second = metrics["actor/ppo_kl"]
    assert first == 0  # the same experts as in the old pass, so the same log-probs
    assert second != 0


def test_verl_refuses_r2_with_bypass_at_the_start(model: str) -> None:
    command = COMMAND.replace(".mode=R3", ".mode=R2")
    config = config_of(command, model, "algorithm.rollout_correction.bypass_mode=True")
    with pytest.raises(ValueError, match=r"requires algorithm\.rollout_correction.bypass_mode=False"):
        validate_config(config, use_reference_policy=False, use_critic=False)
