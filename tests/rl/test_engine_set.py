"""Several engines of one run: each gets the weights in its own form, and a step is spread over all of them."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from router_replay.engines import EmbeddedEngine, EnginePool, Request, Sampling
from router_replay.errors import ConfigError, EngineError
from router_replay.replay import RouterReplay
from router_replay.rl import engine_set
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.engine_set import EngineSet
from router_replay.rl.loop.train import train
from router_replay.rl.weights.sync import WeightSync
from tests.engines.sglang import conftest as sglang_stub
from tests.engines.stub import Reply, Stub
from tests.rl.state.test_checkpoints import final_weights, lines

stub = sglang_stub.stub


def test_every_engine_gets_each_version_in_its_own_form(
    random_model: pathlib.Path, stub: Stub, tmp_path: pathlib.Path
) -> None:
    """A server of another kind reads a folder, and the engine of this process takes the tensors."""
    tables = (
        "engines=[{dtype = 'float32', max_length = 64}, "
        f"{{kind = 'sglang', url = '{stub.url}', weights = '{tmp_path}', max_length = 32}}]"
    )
    config = load_config(None, [f"model.path={random_model}", "rollout.seeded=false", tables])
    model = AutoModelForCausalLM.from_pretrained(random_model)
    replayer = RouterReplay(model)
    with contextlib.ExitStack() as closing:
        engines = EngineSet(config, model, replayer.router_names)
        closing.callback(engines.close)
        pool = closing.enter_context(engines.start(model.state_dict(), replayer.spec, version=3))
        assert isinstance(pool, EnginePool)
        assert pool.version == 3
        assert engines.ways == {"engine0": "as a folder", "engine1": "as a folder"}
        assert engines.by_cuda_ipc == 0
        changed = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
        engines.push(pool, changed, version=4)
        assert {name: facts["version"] for name, facts in pool.report().items()} == {"engine0": 4, "engine1": 4}
        folders = [pathlib.Path(body["model_path"]) for body in stub.bodies("/update_weights_from_disk")]
        assert [folder.name for folder in folders] == ["version_3", "version_4"]
        assert all(folder.is_relative_to(tmp_path) for folder in folders)
        assert [folder.is_dir() for folder in folders] == [False, True]  # a server that returns reads the newest
        inside = pool._members[0].engine
        name = "lm_head.weight"
        assert inside._model.state_dict()[name].equal(changed[name])  # type: ignore[attr-defined]
    assert not any(folder.exists() for folder in folders)


def test_weights_are_written_while_no_engine_can_return(
    random_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All versions may share one memory, from which an engine that returns would read."""
    config = load_config(None, [f"model.path={random_model}", "engine.count=2", "engine.max_length=64"])
    model = AutoModelForCausalLM.from_pretrained(random_model)
    replayer = RouterReplay(model)
    held: list[bool] = []
    with contextlib.ExitStack() as closing:
        engines = EngineSet(config, model, replayer.router_names)
        closing.callback(engines.close)
        pool = closing.enter_context(engines.start(model.state_dict(), replayer.spec, version=0))
        assert isinstance(pool, EnginePool)
        source = WeightSync.source

        def noting(*given: Any, **named: Any) -> Any:
            held.append(pool._control._is_owned())  # type: ignore[attr-defined]
            return source(*given, **named)

        monkeypatch.setattr(WeightSync, "source", noting)
        engines.push(pool, model.state_dict(), version=1)
        assert held == [True]


def test_a_way_that_is_not_possible_ends_the_start_and_its_engine(
    random_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def embedded(config: TrainConfig, folder: pathlib.Path, *_: object) -> EmbeddedEngine:
        started.append(EmbeddedEngine(folder, max_length=64))
        return started[-1]

    monkeypatch.setattr(engine_set, "start_engine", embedded)  # another engine than the settings name
    config = load_config(None, ["engine.kind=vllm", "engine.transfer=cuda_ipc"])
    model = AutoModelForCausalLM.from_pretrained(random_model)
    replayer = RouterReplay(model)
    engines = EngineSet(config, model, replayer.router_names, gpu=None)
    with pytest.raises(ConfigError, match=r'"cuda_ipc" is not possible: the trainer computes on a CPU'):
        engines.start(model.state_dict(), replayer.spec, version=0)
    engines.close()
    with pytest.raises(EngineError, match="closed"):
        started[0].generate([Request((3, 4), Sampling(max_tokens=1))])


def test_a_run_with_two_engines_is_that_of_one(
    make_config: Callable[..., TrainConfig], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; only rounding depends on which requests share a pass."""
    served: list[dict[str, int]] = []

    class Watched(EnginePool):
        def close(self) -> None:
            served.append({name: facts["served"] for name, facts in self.report().items()})
            super().close()

    monkeypatch.setattr(engine_set, "EnginePool", Watched)
    one, two = tmp_path / "one", tmp_path / "two"
    train(make_config("optimizer.lr=1e-4", "steps=3", f"output={one}"))
    train(make_config("optimizer.lr=1e-4", "steps=3", f"output={two}", "engine.count=2"))
    assert [sum(counts.values()) for counts in served] == [9]  # three steps of three groups
    assert all(served[0].values())
    assert [line["reward"] for line in lines(one)] == [line["reward"] for line in lines(two)]
    assert all(line["routes/live"] == 0 for line in lines(two))
    expected, got = final_weights(one), final_weights(two)
    assert max(float((expected[name] - got[name]).abs().max()) for name in expected) < 2e-5


def test_engines_that_were_started_are_closed_if_another_one_fails(
    random_model: pathlib.Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.answers["/update_weights_from_disk"] = Reply({"success": False, "message": "no room"})
    started = []

    def remember(*given: object) -> object:
        started.append(start(*given))
        return started[-1]

    start = engine_set.start_engine
    monkeypatch.setattr(engine_set, "start_engine", remember)
    config = load_config(None, [f"engines=[{{max_length = 64}}, {{kind = 'sglang', url = '{stub.url}'}}]"])
    model = AutoModelForCausalLM.from_pretrained(random_model)
    replayer = RouterReplay(model)
    engines = EngineSet(config, model, replayer.router_names)
    with pytest.raises(EngineError, match="no room"):
        engines.start(model.state_dict(), replayer.spec, version=0)
    engines.close()
    [first] = started
    with pytest.raises(EngineError, match="closed"):
        first.generate([Request((3, 4), Sampling(max_tokens=1))])  # type: ignore[attr-defined]
