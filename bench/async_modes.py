"""Compare what happens to answers in progress when the weights change: resume, keep and recompute, side by side.

    python -m bench.async_modes

A short training of the tiny model gives real versions of its weights. The asynchronous rollouts then play with the
embedded engine in float32, while its weights go through these versions. Every token is compared with the log-prob that
the trainer computes with the weights of the token's own version and with the recorded experts. What is left is what the
mode did: a token after a weight change saw keys and values of old weights (keep), or of other experts (recompute).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from router_replay.batch import pack
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.types import Completion, Request
from router_replay.forward import logprobs
from router_replay.measure import logprob_gap
from router_replay.replay import RouterReplay
from router_replay.rl.config import (
    AsynchronousConfig,
    EngineConfig,
    RolloutConfig,
    TrainConfig,
    load_config,
    tiny_folder,
)
from router_replay.rl.environments.base import Environment, Task, Turn
from router_replay.rl.loop.train import train
from router_replay.rl.rollout import Episode
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.checkpoints import found
from router_replay.rl.state.journal import Journal

MODES = ("resume", "keep", "recompute")
LONGEST = 96


class LongTask(Task):
    """Ask for one long answer; a few digits end it, so that lengths differ."""

    max_turns = 1
    stop_token_ids = (6, 8)

    def environment(self) -> Environment:
        """Return an environment of one turn."""
        return LongEnvironment()


class LongEnvironment:
    """Take any answer."""

    def reset(self, problem: int) -> Sequence[int]:
        """Return a prompt of a few tokens."""
        return [5 + (problem * 7 + place) % 8 for place in range(6)]

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Return a reward."""
        return Turn(1.0)


class CountingEngine(EmbeddedEngine):
    """Count passes, so that weights change at the same moments in every mode, and count what is computed again."""

    again = 0

    async def submit(self, request: Request) -> list[Completion]:
        """Count the tokens of prompts that were computed before."""
        self.again += max(0, len(request.token_ids) - 6)
        return await super().submit(request)

    def count_passes(self, every: int) -> threading.Semaphore:
        """Return a semaphore that is released after each `every` decode passes."""
        due, runner = threading.Semaphore(0), self._schedule._runner
        decode, passes = runner.decode, [0]

        def counted(version: int) -> None:
            decode(version)
            passes[0] += 1
            if passes[0] % every == 0:
                due.release()

        runner.decode = counted  # type: ignore[method-assign]
        return due


def versions_of(folder: pathlib.Path, count: int, lr: float) -> list[dict[str, torch.Tensor]]:
    """Train the tiny model for a few steps, and return the weights before and after each of them."""
    settings = [
        f"output={folder}", f"steps={count}", "checkpoint.every=1", f"checkpoint.keep={count + 1}",
        "engine.dtype=float32", f"optimizer.lr={lr}", "rollout.prompts=16", "rollout.group=4",
        "logging.tensorboard=false",
    ]  # fmt: skip
    train(load_config(None, settings))
    models = [tiny_folder(), *found(folder)]
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in models]


def play(mode: str, weights: list[dict[str, torch.Tensor]], groups: int, every: int) -> tuple[list[Episode], Any]:
    """Play with weights that change; return the episodes, and (tokens resumed, tokens again, seconds of changes)."""
    config = TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=groups, group=4, max_tokens=LONGEST, max_turns=1),
        engine=EngineConfig(max_length=LONGEST + 8),
        asynchronous=AsynchronousConfig.model_validate(
            {"on_new_weights": mode, "staleness": "admission", "max_staleness": 1}
        ),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        CountingEngine(tiny_folder(), dtype=torch.float32, eos_token_id=[], max_batch=160) as engine,
    ):
        due = engine.count_passes(every)
        journal = Journal(pathlib.Path(folder))
        stream = RolloutStream(engine, LongTask(), config, journal, StreamState(Ledger(), 0), version=0)
        stream.begin_journal(0)
        lost = 0.0
        with stream:
            for version, state in enumerate(weights[1:], start=1):
                if not due.acquire(timeout=60):
                    raise RuntimeError("the engine ran out of answers: raise --groups, or lower --every")
                started = time.perf_counter()
                stream.new_weights(version, functools.partial(engine.update_weights, state, version))
                lost += time.perf_counter() - started
            episodes = stream.take(len(weights) - 1)
            figures = stream.figures()
        return episodes, (figures["async/tokens_resumed"], engine.again, lost)


def mismatch(episodes: list[Episode], weights: list[dict[str, torch.Tensor]]) -> dict[int, tuple[int, float, float]]:
    """Return (tokens, k3, share of extreme tokens) by the number of versions that a sample spans."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    replayer = RouterReplay(model)
    batch = pack([episode.trajectories[0] for episode in episodes], 1 << 16)
    own = np.zeros(len(batch), np.float32)
    for version, state in enumerate(weights):
        model.load_state_dict(state)
        with torch.no_grad(), replayer.replay(batch):
            found_here = logprobs(model, batch).numpy()
        mine = batch.label_versions == version
        own[mine] = found_here[mine]
    spans = np.array([len(np.unique(episode.versions)) for episode in episodes])
    result = {}
    for span in np.unique(spans).tolist():
        chosen = batch.label_mask & (batch.sample_ids >= 0) & (spans[batch.sample_ids] == span)
        gap = logprob_gap(own, batch.label_logprobs, chosen)
        result[span] = (int(chosen.sum()), gap.k3, gap.extreme(2.0))
    return result


def main() -> int:
    """Print the table; return 1 if mode resume does not reproduce the log-probs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=4, help="weight changes")
    parser.add_argument("--groups", type=int, default=32, help="groups of four episodes")
    parser.add_argument("--every", type=int, default=10, help="decode passes between two changes")
    parser.add_argument("--lr", type=float, default=1e-4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = versions_of(pathlib.Path(folder) / "run", arguments.versions, arguments.lr)
    print(f"tiny model, float32, {arguments.versions} weight changes, lr {arguments.lr:g}")
    print("| mode | versions of a sample | tokens | k3 | extreme tokens | resumed | computed again | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for mode in MODES:
        episodes, (resumed, again, lost) = play(mode, weights, arguments.groups, arguments.every)
        for span, (tokens, k3, extreme) in mismatch(episodes, weights).items():
            worst = max(worst, k3) if mode == "resume" else worst
            whole = f"{resumed:,.0f} | {again:,} | {lost:.2f}"
            print(f"| {mode} | {span} | {tokens:,} | {k3:.1e} | {extreme:.2%} | {whole} |")
    print("resumed, computed again: tokens of the whole run; seconds: from the call until the engine has the weights")
    return int(worst > 1e-6)


if __name__ == "__main__":
    raise SystemExit(main())
