"""What cannot work is refused before anything starts, with the reason; and so is another TRL."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from router_replay.engines import EmbeddedEngine
from router_replay.errors import ConfigError
from router_replay.integrations.trl import seams, settings
from tests.trl_real import makers

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"replay": "R3"}, "replay must be one of"),
        ({"engine": None}, r'"r3" needs the experts of the rollout.*EmbeddedEngine'),
        ({"engine": None, "use_vllm": True, "vllm_mode": "server"}, r"client drops the experts.*VllmHttpEngine"),
        ({"engine": None, "use_vllm": True, "vllm_mode": "colocate"}, r"enable_return_routed_experts.*VllmEngine"),
        ({"use_vllm": True}, "leave use_vllm out"),
        ({"top_k": 5}, "top_k=5: the engines of Router Replay do not have"),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, "min_p=0.1, repetition_penalty=1.1"),
        ({"generation_kwargs": {"seed": 3}}, "generation_kwargs"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({"loss_type": "vespo"}, "vespo"),
        ({"model_init_kwargs": {"use_kernels": True}}, "never call the router"),
        ({"replay": "r2", "engine": None, "steps_per_generation": 1}, "TRL has no such pass"),
        ({"trainer_on_missing": "ignore"}, "on_missing"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Make, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(**{"replay": "r3", "engine": never_started, **given})


def never_started() -> Any:
    raise AssertionError("the engine was started before the settings were checked")


def test_several_processes_need_a_function_and_no_tools(folder: str, tmp_path: Any) -> None:
    args = makers.config(tmp_path)
    with EmbeddedEngine(folder) as engine, pytest.raises(ConfigError, match=r"2 processes.*pass a function"):
        settings.refuse(args, "r3", engine=engine, rollout_func=None, tools=False, processes=2)
    with pytest.raises(ConfigError, match="tools and environments with an engine need one process, got 2"):
        settings.refuse(args, "r3", engine=never_started, rollout_func=None, tools=True, processes=2)


def test_an_engine_with_another_model_is_refused(make: Make) -> None:
    from router_replay.rl.config import tiny_folder

    with EmbeddedEngine(tiny_folder()) as engine, pytest.raises(ConfigError, match="start both with the same model"):
        make("r3", engine=engine)


def test_this_trl_is_the_one_that_was_tested() -> None:
    """If this fails after an update of requirements/trl.txt: compare each line with TRL's source, then the table."""
    version = importlib.metadata.version("trl")
    release = ".".join(version.split(".")[:2])
    assert release in seams.TESTED, f"TRL {version} is none of the tested releases {seams.TESTED}"
    assert seams.problems(release) == []


def test_a_difference_in_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: Any, prompts: Any, num_generations: Any) -> None:
        """As in a later release."""

    with monkeypatch.context() as patch:
        patch.setattr(VLLMGeneration, "generate", generate)
        with pytest.raises(ConfigError, match=r"VLLMGeneration\.generate takes \('self', 'prompts', 'num_gen.*images"):
            seams.refuse_other_trl()
    with monkeypatch.context() as patch:
        patch.delattr(GRPOTrainer, "_compute_loss")
        with pytest.raises(ConfigError, match=r"GRPOTrainer\._compute_loss takes \(\), expected"):
            seams.refuse_other_trl()
    with monkeypatch.context() as patch:
        patch.setattr(GRPOTrainer, "_prepare_inputs", generate)
        with pytest.raises(ConfigError, match="does not mention shuffle_sequence_dict, split_tensor_dict"):
            seams.refuse_other_trl()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.17.0")
    with pytest.raises(ConfigError, match=r"TRL 1\.17\.0 is installed.*with TRL 1\.16 and 1\.9 only.*pip install"):
        from router_replay.integrations.trl import RouterReplayGRPOTrainer  # noqa: F401
