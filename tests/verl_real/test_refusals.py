"""What cannot work is refused with the reason, before verl builds the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verl_real import tiny

# isort: split
import transformers
import verl
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig

from router_replay.errors import ReplayError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp_turbo": ({"strategy": "fsdp_turbo"}, "strategy=fsdp_turbo builds and shards experts in its own way"),
    "a critic": ({"model_type": "value_model"}, "a value_model has no recorded routes"),
    "the reference": ({"forward_only": True}, "the reference model routes live"),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_engine_that_cannot_replay_is_refused(model: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ReplayError, match=f"router_replay.mode=R3 cannot work here: {reason}"):
        tiny.engine(model, **settings)


def test_another_vendor_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    with pytest.raises(ReplayError, match=r"verl chose FSDPEngineWithLMHead .* cuda by nvidia and amd only"):
        tiny.engine(model)
    tiny.engine(model, "disabled")


@pytest.mark.parametrize(
    ("module", "version", "reason"),
    [
        (verl, "0.9.2", r"it was tried with verl 0\.9\.1, and this is verl 0\.9\.2"),
        (transformers, "5.8.0", r"it needs transformers 5\.10\.4 or newer, and this is 5\.8\.0"),
    ],
    ids=["verl", "transformers"],
)
def test_another_version_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, module: Any, version: str, reason: str
) -> None:
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(ReplayError, match=reason):
        tiny.engine(model)


def engine_config(**router_replay: Any) -> FSDPEngineConfig:
    """What verl makes of `+actor_rollout_ref.actor.fsdp_config.router_replay.*`."""
    target = {"_target_": "verl.workers.config.FSDPEngineConfig"}
    return omega_conf_to_dataclass(OmegaConf.create(target | {"router_replay": router_replay}))


def test_a_setting_that_verl_did_not_check_is_refused(model: str) -> None:
    untyped = engine_config(mode="R3").router_replay
    assert not isinstance(untyped, EngineRouterReplayConfig)
    with pytest.raises(ReplayError, match=r"add \+actor_rollout_ref.actor.fsdp_config.router_replay._target_=verl"):
        tiny.engine(model, router_replay=untyped)


def test_files_for_routes_are_refused(model: str) -> None:
    asked = EngineRouterReplayConfig(mode="R3", record_file="routes.bin")
    with pytest.raises(ReplayError, match=r"remove router_replay\.record_file"):
        tiny.engine(model, router_replay=asked)
