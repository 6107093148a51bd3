"""The plugin is found by verl, costs nothing before verl imports its engine, and rests on signatures of verl 0.9.1."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tests.verl_real import tiny

# isort: split
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.engine import EngineRegistry, FSDPEngine, FSDPEngineWithLMHead

PLUGIN, FSDP = "router_replay.integrations.verl", "verl.workers.engine.fsdp.transformer_impl"
SIGNATURES = {
    FSDPEngine.__init__: "self model_config engine_config optimizer_config checkpoint_config",
    FSDPEngine.initialize: "self",
    FSDPEngine.disable_adapter: "self",
    FSDPEngine.forward_backward_batch: "self data loss_function forward_only",
    FSDPEngine._gather_and_unpad_packed: "self tensor pad_size",
    FSDPEngineWithLMHead.forward_step: "self micro_batch loss_function forward_only",
    FSDPEngineWithLMHead.prepare_model_inputs: "self micro_batch",
    FSDPEngineWithLMHead.prepare_model_outputs: "self output output_args micro_batch logits_processor_func",
    EngineRegistry.register: "model_type backend device vendor",
    EngineRouterReplayConfig: "_target_ mode record_file replay_file",
}


def run(code: str, **environment: str) -> str:
    """In a fresh process, as a worker of verl: without the platform of these tests."""
    kept = {name: value for name, value in tiny.cpu.os.environ.items() if not name.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, logging\n{code}"],
        capture_output=True,
        text=True,
        env=kept | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_verl_loads_the_plugin_by_its_entry_point_and_the_engine_when_it_needs_it() -> None:
    code = f"""
import verl
waiting = [type(finder).__module__ for finder in sys.meta_path].count("{PLUGIN}")
early = "{PLUGIN}" in sys.modules, "{FSDP}" in sys.modules, "router_replay.replay" in sys.modules, waiting
from verl.workers.engine import EngineRegistry
engine = EngineRegistry._engines["language_model"]["fsdp2"]["cuda", "nvidia"]
left = [type(finder).__module__ for finder in sys.meta_path].count("{PLUGIN}")
print(early, engine.__module__, left)
"""
    assert run(code) == f"(True, False, False, 1) {PLUGIN}.engine 0"


def test_the_plugin_can_be_imported_after_verls_engines() -> None:
    code = f"""
from verl.workers.engine import EngineRegistry
before = ("cuda", "nvidia") in EngineRegistry._engines["language_model"]["fsdp"]
import {PLUGIN}
print(before, EngineRegistry._engines["language_model"]["fsdp"]["cuda", "nvidia"].__name__)
"""
    assert run(code, VERL_USE_EXTERNAL_PLUGINS="none") == "False FSDPEngineWithRouterReplay"


def test_another_verl_gets_the_refusal_and_keeps_its_own_engine() -> None:
    code = """
import verl
verl.__version__ = "0.10.0"
from verl.workers.engine import EngineRegistry, FSDPEngine
print(list(EngineRegistry._engines["language_model"]["fsdp"]), FSDPEngine.__init__.__module__, "checked" in
    FSDPEngine.__init__.__code__.co_qualname)
"""
    assert run(code) == f"['cuda', 'npu'] {FSDP} True"


@pytest.mark.parametrize("called", SIGNATURES, ids=lambda called: called.__qualname__)
def test_verl_has_the_signatures_that_the_engine_overrides(called: object) -> None:
    assert callable(called)
    assert " ".join(inspect.signature(called).parameters) == SIGNATURES[called]
