"""Answers in progress while the weights change, on a real engine: each token and each row keeps its version."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay.batch import pack
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.types import Request, Sampling
from router_replay.forward import logprobs
from router_replay.measure import logprob_gap
from router_replay.replay import RouterReplay
from router_replay.rl.config import AsynchronousConfig, EngineConfig, RolloutConfig, TrainConfig
from router_replay.rl.environments.base import Environment, Turn
from router_replay.rl.rollout.groups import version_figures
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.journal import Journal
from router_replay.stitch import Trajectory

TOKENS = 48


class Long:
    """One long answer per episode."""

    stop_token_ids: tuple[int, ...] = ()
    problems: int | None = None
    max_turns = 1
    digest = "long"

    def prompt_lengths(self) -> list[tuple[str, int]]:
        return []

    def environment(self) -> Environment:
        return self  # type: ignore[return-value]

    def reset(self, problem: int) -> tuple[int, ...]:
        return (5, 6, 7)

    def step(self, token_ids: list[int]) -> Turn:
        assert len(token_ids) == TOKENS  # an answer that was interrupted is one answer
        return Turn(1.0)


@pytest.fixture
def engine(random_model: pathlib.Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, max_length=128, eos_token_id=[], dtype=torch.float32) as engine:
        yield engine


@pytest.fixture(scope="module")
def changed(random_model: pathlib.Path) -> dict[str, torch.Tensor]:
    """Weights that choose other experts."""
    model: Any = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    torch.manual_seed(1)
    return {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def swap_in_the_middle(engine: EmbeddedEngine) -> Callable[[], None]:
    """Return a call that waits until the running answers have some tokens, but not all."""
    seen, some = [0], threading.Event()
    decode = engine._schedule._runner.decode

    def counted(version: int) -> None:
        decode(version)
        seen[0] += 1
        if seen[0] == 10:
            some.set()

    engine._schedule._runner.decode = counted  # type: ignore[method-assign]
    return lambda: [some.wait(), None][1]


@pytest.mark.parametrize("mode", ["resume", "keep", "recompute"])
def test_each_mode_keeps_versions_and_rows(
    engine: EmbeddedEngine,
    changed: dict[str, torch.Tensor],
    random_model: pathlib.Path,
    tmp_path: pathlib.Path,
    mode: str,
) -> None:
    config = TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=1, group=4, max_tokens=TOKENS),
        engine=EngineConfig(max_length=128),
        asynchronous=AsynchronousConfig.model_validate({"on_new_weights": mode, "max_staleness": 3}),
    )
    asked: list[Request] = []
    submit = engine.submit

    async def listening(request: Request) -> Any:
        asked.append(request)
        return await submit(request)

    engine.submit = listening  # type: ignore[method-assign]
    middle = swap_in_the_middle(engine)
    stream = RolloutStream(engine, Long(), config, Journal(tmp_path), StreamState(Ledger(), 0), version=0)
    stream.begin_journal(0)
    with stream:
        middle()
        stream.new_weights(1, lambda in_flight: engine.update_weights(changed, 1, in_flight))
        episodes = stream.take(1)
        figures = stream.figures()
    assert len(episodes) == 4
    for episode in episodes:
        [trajectory] = episode.trajectories
        assert isinstance(trajectory, Trajectory)
        versions = trajectory.versions[3:]
        assert np.unique(versions).tolist() == [0, 1]
        assert (np.diff(versions) >= 0).all()
        assert trajectory.loss_mask[3:].all()
        rows = trajectory.routes
        assert rows.captured[:-1].all()
        # Row i samples token i + 1, and keeps the version that made it.
        assert rows.versions[2:-1].tolist() == versions.tolist()
    assert version_figures(episodes, 1)["async/versions_per_sample"] == 2
    interrupted = [request for request in asked if len(request.token_ids) > 3]
    if mode == "keep":
        assert not interrupted
        assert figures["async/tokens_resumed"] == 0
        return
    assert len(interrupted) >= 4
    assert figures["async/tokens_resumed"] > 0
    assert all((request.forced_routes is not None) == (mode == "resume") for request in interrupted)
    # The same prefix once more, with all rows returned.
    request = interrupted[0]
    whole = next(one for one in episodes if one.trajectories[0].token_ids[: len(request.token_ids)].tolist()
                 == list(request.token_ids)).trajectories[0]  # fmt: skip
    assert whole.routes is not None
    known = whole.routes[: len(request.token_ids) - 1]
    forced = known if mode == "resume" else None
    [answer] = engine.generate([Request(request.token_ids, Sampling(max_tokens=1), forced_routes=forced)])
    assert answer.routes[: len(known)].same_sets(known) == (mode == "resume")
    # With the recorded rows, the new weights give the log-probs that the engine had; without them they do not.
    model: Any = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float32)
    model.load_state_dict(changed)
    batch = pack([one.trajectories[0] for one in episodes], 512)
    with torch.no_grad(), RouterReplay(model).replay(batch):
        now = logprobs(model, batch)
    newer = batch.label_mask & (batch.label_versions == 1)
    gap = logprob_gap(now.numpy(), batch.label_logprobs, newer)
    assert (gap.abs_max < 1e-4) == (mode == "resume")


def test_a_request_that_waited_in_the_queue_is_sent_again_as_it_was(
    engine: EmbeddedEngine, changed: dict[str, torch.Tensor], tmp_path: pathlib.Path
) -> None:
    config = TrainConfig(
        loop="async",
        rollout=RolloutConfig(prompts=1, group=4, max_tokens=TOKENS),
        engine=EngineConfig(max_length=128),
        asynchronous=AsynchronousConfig(max_staleness=3),
    )
    asked: list[Request] = []
    submit, waiting = engine.submit, threading.Event()

    async def listening(request: Request) -> Any:
        asked.append(request)
        if len(asked) == 16:  # the four groups that the policy admits
            waiting.set()
        return await submit(request)

    engine.submit = listening  # type: ignore[method-assign]
    engine.pause("keep")
    stream = RolloutStream(engine, Long(), config, Journal(tmp_path), StreamState(Ledger(), 0), version=0)
    stream.begin_journal(0)
    with stream:
        waiting.wait()
        stream.new_weights(1, lambda in_flight: engine.update_weights(changed, 1, in_flight))
        engine.resume()
        episodes = stream.take(1)
    assert all((episode.versions == 1).all() for episode in episodes)
    by_id = {request.id: request for request in asked}
    assert len(by_id) == len(asked)
    for first in asked[:16]:
        again = by_id[first.id.removesuffix(".0") + ".1"]
        assert (again.token_ids, again.sampling, again.start) == (first.token_ids, first.sampling, 0)
        assert again.forced_routes is None
        assert again.known_routes is None
