"""New weights by vLLM's own calls and our backend, and by shared memory: the real server, taken from A to B and back.

What vLLM said on B when it had just started is the reference of everything that comes to B later.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from router_replay.engines import Completion, Request
from router_replay.engines.shared_memory import PREFIX, SHARED_MEMORY, sweep
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.plugin.weights.loader import LAYERWISE, RELOADERS, WeightLoader, without_false_alarm
from router_replay.engines.vllm.plugin.weights.sources import open_source
from router_replay.engines.vllm.weights import SharedWeights, checkpoint_tensors, share
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, KEY, Checkpoints, Servers, one, prompt, same

State = dict[str, torch.Tensor]


def state_of(folder: str) -> State:
    return load_file(pathlib.Path(folder, "model.safetensors"))


# -- shared memory, without an engine -----------------------------------------------------------------


def test_shared_tensors_are_what_the_other_side_reads() -> None:
    state = {
        "a": torch.arange(6.0).view(2, 3).T,  # not contiguous
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.randn(5).to(torch.bfloat16),
        "d": torch.empty(0, 4),
        "e": torch.randn(7).to(torch.float8_e4m3fn),
    }
    with share(state) as weights:
        read = dict(open_source(json.loads(json.dumps(weights.info()))))
        assert list(read) == list(state)
        for name, tensor in state.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read[name].float(), tensor.float())
        read["a"].zero_()  # a worker's mistake stays with the worker
        assert torch.equal(dict(open_source(weights.info()))["a"], state["a"])
        weights.write({name: tensor.float() * 2 for name, tensor in state.items()})
        assert torch.equal(dict(open_source(weights.info()))["c"], state["c"] * 2)
        with pytest.raises(EngineError, match=r"a has shape \[2, 3\], expected \[3, 2\]"):
            weights.write(state | {"a": state["a"].T})
        with pytest.raises(EngineError, match="in only one of the two: e"):
            weights.write({name: tensor for name, tensor in state.items() if name != "e"})
    assert not (SHARED_MEMORY / weights.name).exists()
    with pytest.raises(EngineError, match="was closed"):
        weights.write(state)


def test_shared_memory_goes_with_its_owner() -> None:
    weights = share({"a": torch.zeros(3)})
    path = SHARED_MEMORY / weights.name
    assert path.stat().st_mode & 0o777 == 0o600
    del weights
    assert not path.exists()


def test_more_shared_memory_than_there_is_is_an_error_and_leaves_nothing() -> None:
    before = segments()
    huge = {"a": torch.empty(1 << 50, device="meta")}
    with pytest.raises(EngineError, match="MiB of shared memory could not be allocated"):
        SharedWeights(huge)
    assert segments() == before


def test_tensors_that_cannot_be_written_leave_nothing() -> None:
    before = segments()
    with pytest.raises(NotImplementedError) as caught:
        share({"a": torch.empty(4, device="meta")})
    assert segments() == before  # also while somebody looks at the error, which holds the object
    del caught


@pytest.mark.parametrize("error", [MemoryError("no"), OverflowError("no"), KeyboardInterrupt()])
def test_memory_that_cannot_be_mapped_is_given_back(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fails(*_: Any) -> None:
        raise error

    before = everything()
    monkeypatch.setattr("router_replay.engines.vllm.weights.mmap.mmap", fails)
    with pytest.raises(type(error)):
        SharedWeights({"a": torch.zeros(3)})
    assert everything() == before


def test_what_a_killed_process_left_goes_when_others_share() -> None:
    """Not only in a training run of ours: a user's trainer calls share alone."""
    code = (
        "import os, torch; from router_replay.engines.vllm.weights import share; "
        "weights = share({'a': torch.zeros(3)}); print(weights.name, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = SHARED_MEMORY / killed.stdout.strip()
    assert left.is_file()
    with share({"a": torch.zeros(3)}) as mine:
        assert not left.exists()
        with share({"a": torch.zeros(3)}):
            assert (SHARED_MEMORY / mine.name).exists()


def test_a_fork_that_ends_does_not_take_the_trainers_memory_with_it() -> None:
    code = (
        "import gc, os, torch; from router_replay.engines.vllm.weights import share, SHARED_MEMORY\n"
        "weights = share({'a': torch.zeros(3)}); path = SHARED_MEMORY / weights.name\n"
        "child = os.fork()\n"
        "if not child:\n    weights.close(); os._exit(0)\n"
        "os.waitpid(child, 0); print(path.exists()); weights.close(); print(path.exists())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_sweep_is_not_held_up_or_led_astray_by_what_others_put_there(tmp_path: pathlib.Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f"{PREFIX}{dead.pid}-link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / f"{PREFIX}{dead.pid}-pipe")
    (tmp_path / f"{PREFIX}{dead.pid}-left").touch()
    sweep(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / f"{PREFIX}{dead.pid}-left").exists()


def everything() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob(f"router-replay*{os.getpid()}*")}


def segments() -> set[str]:
    """Of this process: others may come and go meanwhile."""
    ours = re.compile(rf"router-replay-{os.getpid()}-[0-9a-f]{{32}}")
    return {path.name for path in SHARED_MEMORY.iterdir() if ours.fullmatch(path.name)}


def test_a_models_tensors_are_those_that_save_pretrained_writes(checkpoints: Checkpoints) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints.a)
    ours, saved = checkpoint_tensors(model), state_of(checkpoints.a)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    assert any("experts.0." in name for name in ours)  # in the module they are fused
    assert not any("experts.0." in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bf16"}, "a: dtype 'bf16' is not one of float64"),
        ({"dtype": "float64"}, r"a: float64 \(4,\) at offset 0 ends at byte 32, the shared memory has 16 bytes"),
        ({"offset": 4}, "ends at byte 20, the shared memory has 16 bytes"),
        ({"offset": -4}, "must be integers of at least 0"),
        ({"offset": 2, "shape": [1]}, "the offset is not a multiple of 4"),
        ({"shape": [2.0, 2]}, "must be integers of at least 0"),
        ({"shape": None}, 'expected {"dtype", "shape", "offset"}'),
    ],
)
def test_an_index_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with share({"a": torch.zeros(4)}) as weights:
        info = copy.deepcopy(weights.info())
        info["shared"]["tensors"]["a"] |= change
        with pytest.raises(EngineError, match=message):
            open_source(info)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "the weight source must be"),
        ({"path": "x", "shared": {}}, "the weight source must be"),
        ({"shared": {"name": "x", "tensors": {}}}, "shared memory must be"),
        ({"cuda": {"gpu": "GPU-1", "memory": []}}, "GPU memory must be"),
        ({"cuda": {"gpu": "GPU-1", "memory": [], "tensors": {"a": {}}}}, "this vLLM worker uses "),
        (
            {"shared": {"name": "../etc/passwd", "tensors": {"a": {}}}},
            "the name of shared memory must be that of a file",
        ),
        ({"shared": {"name": "router-replay-gone", "tensors": {"a": {}}}}, "cannot be read by the vLLM worker"),
    ],
)
def test_a_source_that_is_none_is_refused(source: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        open_source(source)


def test_a_file_that_was_cut_is_refused(tmp_path: pathlib.Path, checkpoints: Checkpoints) -> None:
    whole = pathlib.Path(checkpoints.a, "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(EngineError, match="is not a complete safetensors file"):
        open_source({"path": str(tmp_path)})


def test_a_load_that_fails_on_the_way_is_the_end_of_the_worker(checkpoints: Checkpoints) -> None:
    """Behind the checks nothing that a test can send makes a real worker fail here, so this one is made to."""

    def reload_weights(weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        next(weights_iterator)
        raise MemoryError("no more")

    config = types.SimpleNamespace(model=checkpoints.a, revision=None)
    runner = types.SimpleNamespace(model_config=config, get_model=torch.nn.Module)
    worker = types.SimpleNamespace(model_runner=runner, device=torch.device("cpu"), reload_weights=reload_weights)
    loader = WeightLoader(worker)
    loader.refuse_broken()
    with pytest.raises(EngineError, match="failed partway, so it is unknown which weights the worker has"):
        loader.load(open_source({"path": checkpoints.a}))
    for call in (loader.refuse_broken, lambda: loader.open({"path": checkpoints.a})):  # every step, every update
        with pytest.raises(EngineError, match="it is unknown which weights the worker has"):
            call()


# -- the real server ----------------------------------------------------------------------------------


class Weights:
    """vLLM's own calls, as a user's trainer makes them."""

    def __init__(self, url: str, engine: VllmHttpEngine) -> None:
        self.url, self.engine = url, engine

    def post(self, route: str, body: object = None) -> str:
        """What the server says of an error; empty where all is well."""
        data = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        call = urllib.request.Request(self.url + route, data, headers)
        try:
            with urllib.request.urlopen(call, timeout=60):
                return ""
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read().decode()}"

    def send(self, info: dict[str, Any]) -> str:
        assert not self.post("/start_weight_update")
        refused = self.post("/update_weights", {"update_info": info})
        if not refused:
            assert not self.post("/finish_weight_update")
            assert not self.post("/reset_prefix_cache")
        return refused

    def answer(self) -> Completion:
        return one(self.engine, Request(prompt(), GREEDY))


@pytest.fixture(scope="module")
def server(servers: Servers, vllm_http_engine: VllmHttpEngine) -> Weights:
    return Weights(servers.ours.url, vllm_http_engine)


@pytest.fixture(scope="module")
def on_a(server: Weights) -> Completion:
    return server.answer()


@pytest.fixture
def weights(server: Weights, on_a: Completion, checkpoints: Checkpoints) -> Iterator[Weights]:
    """On A, as version 0, before and after each test."""
    assert same(server.answer(), on_a)
    yield server
    server.engine.update_weights(checkpoints.a, 0)


def test_folder_file_and_shared_memory_all_give_the_weights_to_the_bit(
    weights: Weights, on_a: Completion, vllm_fresh_b: Completion, checkpoints: Checkpoints
) -> None:
    assert not same(on_a, vllm_fresh_b)
    for a, b in [
        ({"path": checkpoints.a}, {"path": f"{checkpoints.b}/model.safetensors"}),
        (share(state_of(checkpoints.a)).info, share(state_of(checkpoints.b)).info),
    ]:
        for source, expected in ((b, vllm_fresh_b), (a, on_a), (a, on_a), (b, vllm_fresh_b)):
            assert not weights.send(source() if callable(source) else source)
            assert same(weights.answer(), expected)


def test_our_own_call_takes_shared_memory(
    weights: Weights, on_a: Completion, vllm_fresh_b: Completion, checkpoints: Checkpoints
) -> None:
    engine = weights.engine
    model = AutoModelForCausalLM.from_pretrained(checkpoints.b)
    with share(checkpoint_tensors(model)) as shared:
        engine.update_weights(shared, 2)
        assert same(weights.answer(), vllm_fresh_b)
        shared.write(state_of(checkpoints.a))
        engine.update_weights(shared, 3)
    after = weights.answer()  # the memory is gone, the weights are the engine's
    assert same(after, on_a)
    assert set(after.versions) == {3}


def one_expert_less(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "layers.2.mlp.experts.7.up_proj" not in name}


def without_bias(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if "layers.3.mlp.gate.e_score" not in name}


def renamed(state: State) -> State:
    return {name.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.qq_proj"): t for name, t in state.items()}


def one_column_more(state: State) -> State:
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    return state | {name: torch.cat([state[name], state[name][:, :1]], 1)}


def integers(state: State) -> State:
    return state | {"model.norm.weight": state["model.norm.weight"].to(torch.int32)}


WRONG = [
    (one_expert_less, r"weights are missing: .*layers\.2\.mlp\.experts\S*w13_weight.*experts\.7\.up_proj"),
    (without_bias, r"weights are missing: .*layers\.3\.mlp\.\S*e_score_correction_bias"),
    (renamed, r"qq_proj"),
    (one_column_more, r"experts\.7\.up_proj\.weight has shape \[32, 65\], expected \[32, 64\]"),
    (integers, r"model\.norm\.weight is torch\.int32, expected torch\.float32"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    weights: Weights, on_a: Completion, checkpoints: Checkpoints, tmp_path: pathlib.Path, spoil: Any, message: str
) -> None:
    spoilt = spoil(state_of(checkpoints.b))
    save_file(spoilt, tmp_path / "model.safetensors")
    with share(spoilt) as shared:
        for source in ({"path": str(tmp_path)}, shared.info()):
            assert re.search(message, weights.send(source))
            assert same(weights.answer(), on_a)
        with pytest.raises(EngineError, match=message):
            weights.engine.update_weights(shared, weights.engine.version + 1)
    assert same(weights.answer(), on_a)


def test_memory_that_is_gone_and_an_empty_session_change_nothing(weights: Weights, on_a: Completion) -> None:
    with share({"a": torch.zeros(4)}) as closed:
        pass
    assert "cannot be read by the vLLM worker" in weights.send(closed.info())
    assert not weights.post("/start_weight_update")
    assert "without update_weights before it: the weights were not changed" in weights.post("/finish_weight_update")
    assert same(weights.answer(), on_a)


def test_wider_tensors_are_taken(weights: Weights, vllm_fresh_b: Completion, checkpoints: Checkpoints) -> None:
    """A trainer's master weights may be wider than the engine's."""
    state = {name: tensor.double() for name, tensor in state_of(checkpoints.b).items()}
    with share(state) as shared:
        assert not weights.send(shared.info())
    assert same(weights.answer(), vllm_fresh_b)


def test_weights_that_were_loaded_are_not_said_to_be_missing(
    weights: Weights, checkpoints: Checkpoints, servers: Servers
) -> None:
    """vLLM warns after every reload of a MoE model that its experts were not loaded."""
    assert not weights.send({"path": checkpoints.b})
    weights.engine.update_weights(checkpoints.a, weights.engine.version + 1)
    assert "not loaded from checkpoint" not in servers.ours.log.read_text()


def test_other_warnings_and_those_of_other_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    message = "Following weights were not loaded from checkpoint: %s"
    for name in RELOADERS:
        logger = logging.getLogger(name)
        logger.propagate = True  # vLLM has handlers of its own, and does not pass records on
        logger.parent, parent = logging.getLogger(), logger.parent
        try:
            with without_false_alarm():
                logger.warning(message, {"w13"})
                logger.warning("something else")
            logger.warning(message, {"w2"})
        finally:
            logger.parent = parent
    assert caplog.messages == ["something else", message % {"w2"}] * 2


def test_layers_that_got_no_weights_are_an_alarm_unless_they_were_written_directly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger(LAYERWISE)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "parent", logging.getLogger())
    for partial in (True, False):
        with without_false_alarm(partial):
            logger.warning("%s: Failed to load weights", "RMSNorm")
    assert caplog.messages == ["RMSNorm: Failed to load weights"]
