"""Evaluations: problems apart from training, one version of the weights for all their tokens, and each one once."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from router_replay.engines.types import Completion, InFlight, Request
from router_replay.errors import ConfigError, RewardError, TrainError
from router_replay.rl.config import EvaluationConfig, TrainConfig, check_config, load_config
from router_replay.rl.environments import make_task
from router_replay.rl.environments.base import Environment, Turn
from router_replay.rl.log.evaluations import read_evaluations
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.loop.first_rank import FirstRank
from router_replay.rl.loop.train import train
from router_replay.rl.policy.models import load_tokenizer
from router_replay.rl.rollout.evaluation import Evaluation, evaluation_task, result_of
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.stream import RolloutStream
from router_replay.rl.state.journal import Journal
from tests.rl.rollout.chance_engine import ChanceEngine, ChanceEnvironment, ChanceTask
from tests.rl.rollout.test_stream import config_of


class CountingEngine(ChanceEngine):
    """Notes the versions of every answer to an evaluation, and when weights change."""

    def __init__(self) -> None:
        super().__init__(seed=3, longest=40)
        self.versions: dict[int, list[int]] = {}
        self.asked = threading.Event()

    async def submit(self, request: Request) -> list[Completion]:
        of = request.id.partition(".")[0].removeprefix("evaluation")
        if request.id.startswith("evaluation"):
            self.asked.set()
        completions = await super().submit(request)
        if request.id.startswith("evaluation"):
            self.versions.setdefault(int(of), []).extend(completions[0].versions.tolist())
        return completions


@pytest.mark.parametrize("mode", ["resume", "keep", "recompute"])
def test_new_weights_wait_until_every_token_of_an_evaluation_has_its_version(tmp_path: pathlib.Path, mode: str) -> None:
    config = config_of(2, 2, max_staleness=2, on_new_weights=mode)
    config = config.model_copy(update={"evaluation": EvaluationConfig(every=1, prompts=24, group=2)})
    with CountingEngine() as engine:
        evaluation = Evaluation(engine, ChanceTask(), config, lambda: None)
        stream = RolloutStream(engine, ChanceTask(), config, Journal(tmp_path), StreamState(Ledger(), 0), version=0)
        stream.begin_journal(0)
        with stream:
            for version in range(4):
                engine.asked.clear()
                stream.evaluate(evaluation)
                assert engine.asked.wait(60)  # it is in progress, and the weights change at once
                stream.take(version)
                stream.new_weights(version + 1, lambda kept, to=version + 1: engine.update_weights({}, to, kept))
                result = stream.evaluated()
                assert result is not None
                assert (result.version, result.episodes) == (version, 48)
                assert set(engine.versions[version]) == {version}
                assert stream.figures()["evaluation/waited"] >= 0
            assert stream.evaluated() is None


def test_an_evaluation_of_two_versions_is_refused(tmp_path: pathlib.Path) -> None:
    """The weights change behind the stream's back."""
    config = config_of(1, 2).model_copy(update={"evaluation": EvaluationConfig(every=1, prompts=16)})

    class Behind(CountingEngine):
        def update_weights(self, source: Any, version: int, in_flight: InFlight = "abort") -> None:
            super().update_weights(source, version, "keep")

    class Waiting(ChanceTask):
        """The first turn ends at version 0, the second one is asked for at version 1."""

        def environment(self) -> Environment:
            return TwoTurns()

    class TwoTurns(ChanceEnvironment):
        def step(self, token_ids: Sequence[int]) -> Turn:
            engine.update_weights({}, 1)
            return Turn(1.0, done=len(token_ids) == 0, observation=(9,))

    with Behind() as engine:
        stream = RolloutStream(engine, ChanceTask(), config, Journal(tmp_path), StreamState(Ledger(), 0), version=0)
        stream.begin_journal(0)
        with stream:
            stream.evaluate(Evaluation(engine, Waiting(), config, lambda: None))
            with pytest.raises(TrainError, match="the evaluation of version 0 has tokens of version 1"):
                stream.evaluated()


def test_an_error_in_an_evaluation_reaches_the_trainer(tmp_path: pathlib.Path) -> None:
    class Broken(ChanceTask):
        def environment(self) -> Environment:
            raise ZeroDivisionError("mine")

    config = config_of(1, 2).model_copy(update={"evaluation": EvaluationConfig(every=1, prompts=2)})
    with ChanceEngine(0) as engine:
        stream = RolloutStream(engine, ChanceTask(), config, Journal(tmp_path), StreamState(Ledger(), 0), version=0)
        stream.begin_journal(0)
        with stream:
            stream.evaluate(Evaluation(engine, Broken(), config, lambda: None))
            with pytest.raises(RewardError, match="ZeroDivisionError: mine"):
                stream.evaluated()


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_both_loops_evaluate_the_same_versions_and_resume_repeats_none(
    make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"prompt": f"{number}+1=", "answer": ""}) for number in range(3)))
    settings = [f"loop={loop}", "evaluation.every=2", "evaluation.prompts=3", "evaluation.group=2",
                f"evaluation.file={other}"]  # fmt: skip
    played: list[int] = []
    real = FirstRank._note_evaluation

    def noted(self: FirstRank, result: Any) -> None:
        played.extend([] if result is None else [result.version])
        real(self, result)

    monkeypatch.setattr(FirstRank, "_note_evaluation", noted)
    train(make_config(*settings, "steps=3"))
    config = make_config(*settings, "steps=5")
    assert [one.version for one in read_evaluations(config.output)] == [0, 2, 3]
    train(config, resume=True)
    assert [one.version for one in read_evaluations(config.output)] == played == [0, 2, 3, 4, 5]
    assert {one.episodes for one in read_evaluations(config.output)} == {6}
    lines = read_metrics(config.output)
    assert lines[-1]["evaluation/version"] == 5
    seen = {line["evaluation/version"]: line["evaluation/reward"] for line in lines if "evaluation/version" in line}
    assert seen.items() <= {one.version: one.reward for one in read_evaluations(config.output)}.items()


def test_evaluations_ask_other_problems_than_training(random_model: pathlib.Path) -> None:
    tokenizer = load_tokenizer(random_model)
    config = load_config(None, ["evaluation.every=1", "environment.digits=6"])
    training = make_task(config.environment, tokenizer, config.seed)
    asked, again = evaluation_task(config, tokenizer), evaluation_task(config, tokenizer)
    for problem in range(8):
        prompt = asked.environment().reset(problem)
        assert prompt == again.environment().reset(problem)
        assert prompt != training.environment().reset(problem)


def test_settings_without_an_effect_are_refused(make_config: Callable[..., TrainConfig]) -> None:
    for settings, words in (
        (["evaluation.prompts=3"], r"evaluation\.prompts with evaluation\.every = 0"),
        (["evaluation.every=1"], r"evaluation\.file is missing"),
        (["evaluation.every=1", "evaluation.file=a", "environment.kind=arithmetic"], r"evaluation\.file with"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_config(make_config(*settings), 1)


def test_a_result_has_the_means_of_its_episodes() -> None:
    class One:
        def __init__(self, reward: float, version: int) -> None:
            self.reward, self.turns, self.problem, self.sampled_tokens = reward, 2, 7, 4
            self.versions = np.full(4, version)

    result = result_of([One(1.0, 3), One(0.0, 3)], 3, 1.5)  # type: ignore[list-item]
    assert (result.reward, result.reward_std, result.turns, result.response_length) == (0.5, 0.5, 2, 4)
    assert result.as_metrics()["evaluation/version"] == 3
    with pytest.raises(TrainError, match=r"version 3 has tokens of version 4 \(problem 7\)"):
        result_of([One(1.0, 4)], 3, 1.5)  # type: ignore[list-item]
