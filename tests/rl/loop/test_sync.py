"""The loop whole: each mode's figures, several processes, and what is saved when something goes wrong."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from router_replay import wire
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.types import Completion, Request
from router_replay.errors import ConfigError, EngineError, RewardError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.log.metrics import NAMES, MetricsWriter, read_metrics
from router_replay.rl.loop.train import train
from router_replay.rl.policy import policy
from router_replay.rl.rollout.player import Player
from router_replay.rl.state import checkpoints
from router_replay.rl.weights.sync import WeightSync

ROOT = pathlib.Path(__file__).parents[3]


def weights(output: pathlib.Path) -> dict[str, torch.Tensor]:
    folder = checkpoints.latest(output)
    assert folder is not None
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("mode", ["off", "r2", "r3"])
def test_each_mode_learns_and_says_what_it_did(make_config: Callable[..., TrainConfig], mode: str) -> None:
    config = make_config(f"replay={mode}", "steps=4", "optimizer.lr=5e-3", "rollout.prompts=6")
    train(config)
    lines = read_metrics(config.output)
    assert lines[-1]["reward"] > lines[0]["reward"] * 1.3
    for line in lines:
        assert set(line) - {"step"} <= set(NAMES)
        assert line["mismatch/k3"] < 1e-9  # engine and trainer compute the same thing here
        assert line["routes/agreement"] > 0.999
        assert (line["routes/replayed"] > 0) == (mode != "off")
        scored_and_updated = 2 * (line["tokens"] - 24)  # the last token of each episode predicts nothing
        more = 24 if mode == "r2" else 0  # its rows are those of a whole pass, the last ones among them
        assert line["routes/replayed"] + line["routes/live"] == scored_and_updated + more
        assert line["version"] == line["step"] + 1
        if mode == "r3":
            assert line["routes/live"] == 0


def test_the_calculator_plays_several_turns(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("environment.kind=calculator", "replay=r3", "rollout.max_tokens=8", "rollout.prompts=8")
    train(config)
    lines = read_metrics(config.output)
    assert max(line["turns"] for line in lines) > 1
    for line in lines:  # rows stitched over turns are those of their tokens
        assert line["routes/live"] == 0
        assert line["routes/agreement"] > 0.999
        assert line["mismatch/k3"] < 1e-9


@pytest.mark.parametrize(
    "more",
    [[], ["trainer.ulysses=2"], ["trainer.ulysses=2", "loss.kind=gspo"], ["replay=r2"]],
    ids=["fsdp2", "ulysses", "ulysses_gspo", "fsdp2_r2"],
)
def test_two_processes_do_what_one_does(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path, more: list[str]
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    # Adam divides by the size of a gradient: rounding in one that is nearly zero must not decide a step.
    common = ["optimizer.lr=1e-4", *(setting for setting in more if "ulysses" not in setting)]
    train(make_config(*common, f"output={alone}"))
    arguments = [part for setting in [*settings, *common, *more, f"output={together}"] for part in ("--set", setting)]
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "router_replay.cli"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, *command, "train", *arguments], env=environment, check=True, timeout=600)
    for a, b in zip(read_metrics(alone), read_metrics(together), strict=True):
        assert a["reward"] == b["reward"]
        for name in ("loss", "grad_norm", "entropy", "ppo_kl"):
            assert abs(a[name] - b[name]) < 1e-5, name
        assert b["routes/replayed"] >= a["routes/replayed"]  # a filler pass may make ranks even
        for name in ("routing/load", "routing/confidence", "routing/entropy"):
            assert abs(a[name] - b[name]) < 1e-4, name
    expected, got = weights(alone), weights(together)
    assert max(float((expected[name] - got[name]).abs().max()) for name in expected) < 2e-5


# -- when something goes wrong --------------------------------------------------------------------------


def test_a_reward_function_that_raises_loses_nothing(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config("environment.reward=tests.rl.rewards:breaks")
    with pytest.raises(RewardError) as raised:
        train(config)
    message = str(raised.value)
    assert "the grader fell over" in message
    assert "continue with --resume" in message
    assert checkpoints.latest(config.output) == config.output / "checkpoints" / "step_000000"
    saved = [
        json.loads(line) for line in (config.output / "failed/step_000000/rollouts.jsonl").read_text().splitlines()
    ]
    assert len(saved) == 12
    for line in saved:  # also of those whose reward was never asked for
        routes = wire.decode(base64.b64decode(line["routes"]))
        assert len(routes) == len(line["token_ids"]) == len(line["logprobs"]) == len(line["loss_mask"]) > 6


@pytest.mark.parametrize(("function", "raised"), [("exits", "SystemExit: 0"), ("is_cancelled", "CancelledError")])
def test_a_reward_function_that_ends_the_process_ends_the_run_with_an_error(
    make_config: Callable[..., TrainConfig], function: str, raised: str
) -> None:
    config = make_config(f"environment.reward=tests.rl.rewards:{function}")
    with pytest.raises(RewardError, match=rf"the reward function tests\.rl\.rewards:{function} raised {raised}"):
        train(config)
    assert checkpoints.latest(config.output) == config.output / "checkpoints" / "step_000000"
    assert (config.output / "failed" / "step_000000" / "rollouts.jsonl").exists()


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, RuntimeError])
@pytest.mark.parametrize("phase", ["generate", "write"])
def test_whatever_is_raised_in_a_step_leaves_a_saved_state(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], phase: str
) -> None:
    """Of an engine, a logger or a library: with status 0 and nothing saved a run would look finished."""

    def raises(*_: object) -> None:
        raise kind(0)

    owner = {"generate": EmbeddedEngine, "write": MetricsWriter}[phase]
    monkeypatch.setattr(owner, phase, raises)
    config = make_config()
    expected = TrainError if kind is SystemExit else kind
    with pytest.raises(expected) as raised:
        train(config)
    if kind is SystemExit:
        assert "code of this run called sys.exit(0)" in str(raised.value)
    done = {"generate": 0, "write": 1}[phase]
    assert checkpoints.latest(config.output) == config.output / "checkpoints" / f"step_{done:06}"


def test_sys_exit_while_a_run_starts_is_an_error(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exits(*_: object, **__: object) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("router_replay.engines.embedded.EmbeddedEngine", exits)
    with pytest.raises(TrainError, match=r"code of this run called sys\.exit\(0\)"):
        train(make_config())


def test_a_run_goes_on_after_its_reward_function_was_mended(make_config: Callable[..., TrainConfig]) -> None:
    broken, mended = make_config("environment.reward=tests.rl.rewards:breaks"), make_config()
    with pytest.raises(RewardError):
        train(broken)
    assert train(mended, resume=True).step == 2
    other = mended.model_copy(update={"output": mended.output.with_name("straight")})
    train(other)
    a, b = weights(mended.output), weights(other.output)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_nan_in_the_middle_of_a_step_keeps_the_last_whole_state(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("steps=3", "checkpoint.every=1", "replay=off", "trainer.max_tokens=4096")
    real, calls = policy.policy_loss, []

    def poisoned(*arguments: Any) -> Any:
        calls.append(1)
        loss, sums = real(*arguments)
        return (loss * float("nan") if len(calls) == 4 else loss), sums  # the second mini-batch of the second step

    monkeypatch.setattr(policy, "policy_loss", poisoned)
    with pytest.raises(TrainError) as raised:
        train(config)
    assert "step 1: loss is nan" in str(raised.value)
    assert checkpoints.latest(config.output) == config.output / "checkpoints" / "step_000001"
    failed = config.output / "failed" / "step_000001"
    assert (failed / "rollouts.jsonl").exists()
    assert checkpoints.latest(failed) is not None  # half a step's weights, apart from what --resume takes
    monkeypatch.undo()
    train(config, resume=True)
    straight = config.model_copy(update={"output": config.output.with_name("straight")})
    train(straight)
    a, b = weights(config.output), weights(straight.output)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_nan_far_from_the_last_checkpoint_loses_no_step(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("steps=3", "replay=off", "trainer.max_tokens=4096")
    real, calls = policy.policy_loss, []

    def poisoned(*arguments: Any) -> Any:
        calls.append(1)
        loss, sums = real(*arguments)
        return (loss * float("nan") if len(calls) == 4 else loss), sums  # the second mini-batch of the second step

    monkeypatch.setattr(policy, "policy_loss", poisoned)
    with pytest.raises(TrainError, match=r"the finished updates of this step are saved in .*step_000001"):
        train(config)
    monkeypatch.undo()
    assert train(config, resume=True) == checkpoints.Progress(step=3, version=3, problem=9, updates=7)
    assert [line["step"] for line in read_metrics(config.output)] == [0, 1, 2]


def test_only_the_failed_steps_own_rollouts_are_kept(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Player.reset

    def reset(self: Player, number: int, group: int, problem: int) -> Any:
        if problem == 4:
            raise RewardError("problem 4 is no problem")
        return real(self, number, group, problem)

    monkeypatch.setattr(Player, "reset", reset)
    config = make_config()
    with pytest.raises(RewardError, match="step 1: problem 4 is no problem"):
        train(config)
    assert not (config.output / "failed").exists()


def test_an_engine_that_does_not_take_the_weights_costs_no_step(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = WeightSync.push

    def push(self: WeightSync, engine: Any, state: Any, version: int, in_flight: Any = "abort") -> None:
        if version == 2:
            raise EngineError("the engine is gone")
        real(self, engine, state, version, in_flight)

    config = make_config("steps=3")
    with monkeypatch.context() as patch:
        patch.setattr(WeightSync, "push", push)
        with pytest.raises(EngineError, match=r"the engine is gone\nthe state is saved in .*step_000002"):
            train(config)
    train(config, resume=True)
    assert [line["step"] for line in read_metrics(config.output)] == [0, 1, 2]


def test_what_fails_on_the_first_rank_ends_the_others_too(
    make_config: Callable[..., TrainConfig], settings: list[str], tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "push.py"
    script.write_text(
        "import sys\nfrom router_replay.cli import main\nfrom router_replay.errors import EngineError\n"
        "from router_replay.rl.weights.sync import WeightSync\n"
        "def push(*_):\n    raise EngineError('the engine is gone')\n"
        "WeightSync.push = push\nsys.exit(main())\n"
    )
    arguments = [part for setting in settings for part in ("--set", setting)]
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script), "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, check=False, timeout=600, capture_output=True, text=True
    )
    assert done.returncode
    assert "the engine is gone" in done.stderr
    assert checkpoints.latest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step_000001"


class NoRoutes(EmbeddedEngine):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.capabilities = dataclasses.replace(self.capabilities, routes=False, why_not="capture is switched off")


def test_r3_refuses_an_engine_that_does_not_capture(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_replay.engines.embedded.EmbeddedEngine", NoRoutes)
    with pytest.raises(ConfigError, match=r'"r3" needs an engine that returns the experts.*capture is switched off'):
        train(make_config("replay=r3"))
    train(make_config("replay=off", "steps=1"))  # which needs no routes


class FixedWeights(EmbeddedEngine):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.capabilities = dataclasses.replace(self.capabilities, versions=False, why_not="the plugin is missing")


def test_training_refuses_an_engine_that_takes_no_weights(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_replay.engines.embedded.EmbeddedEngine", FixedWeights)
    with pytest.raises(ConfigError, match=r"needs an engine that takes new weights.*the plugin is missing"):
        train(make_config("replay=off", "steps=1"))


class Forgets(EmbeddedEngine):
    """Says that it captures, and after a while does not."""

    def generate(self, requests: Any) -> list[Completion]:
        from router_replay import Routes

        completions = super().generate(list(requests))
        if self.version == 0:
            return completions
        return [dataclasses.replace(one, routes=Routes.missing(len(one.routes), self.spec)) for one in completions]


def test_routes_that_stop_coming_end_the_run_with_a_saved_state(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router_replay.engines.embedded.EmbeddedEngine", Forgets)
    config = make_config("replay=r3")
    with pytest.raises(ValueError, match=r"step 1: sample 0: row .* was not captured"):
        train(config)
    assert checkpoints.latest(config.output) == config.output / "checkpoints" / "step_000001"
    assert (config.output / "failed" / "step_000001" / "rollouts.jsonl").exists()


class Slow(EmbeddedEngine):
    """An engine in which a rollout takes until somebody loses patience."""

    def generate(self, requests: Any) -> list[Completion]:
        wanted: list[Request] = list(requests)
        if self.version == 1:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            time.sleep(600)  # the signal ends it
        return super().generate(wanted)


def test_ctrl_c_ends_with_a_checkpoint_and_the_run_goes_on_from_there(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("steps=3", "checkpoint.every=0")
    with monkeypatch.context() as patch:
        patch.setattr("router_replay.engines.embedded.EmbeddedEngine", Slow)
        with pytest.raises(TrainError, match=r"stopped at step 1; the state is saved in .*step_000001"):
            train(config)
    assert [line["step"] for line in read_metrics(config.output)] == [0]
    assert train(config, resume=True).step == 3
    other = config.model_copy(update={"output": config.output.with_name("straight")})
    train(other)
    a, b = weights(config.output), weights(other.output)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert np.isfinite([line["loss"] for line in read_metrics(config.output)]).all()
