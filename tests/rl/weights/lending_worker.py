"""One of two ranks over gloo: an FSDP2 policy makes an update, and its weights leave in every way.

    torchrun ... -m tests.rl.weights.lending_worker MODEL FOLDER

FOLDER gets what left, what torch's own functions gathered, and for each way what a rank held beside its shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.vllm.plugin.weights.sources import open_source
from router_replay.engines.vllm.weights import checkpoint_tensors
from router_replay.rl.config import EngineConfig, TrainConfig, load_config
from router_replay.rl.policy.models import load_tokenizer, read_model
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks, join, leave
from router_replay.rl.state import checkpoints
from router_replay.rl.state.checkpoints import Progress
from router_replay.rl.weights.held import measured
from router_replay.rl.weights.lending import lending
from router_replay.rl.weights.sync import WeightSync
from tests.engines.stub import eventually

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
costs: dict[str, Any] = {}


@contextlib.contextmanager
def costing(way: str) -> Iterator[None]:
    with measured() as held:
        yield
    with contextlib.suppress(AssertionError):  # the test says what stays
        eventually(lambda: held.now == 0, 20.0)  # gloo's thread may hold the last tensor a moment longer
    costs[way] = dataclasses.asdict(held)


def update(policy: Policy) -> None:
    """One optimizer step with gradients that differ everywhere."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.model.parameters():
        gradient = torch.zeros_like(parameter)
        gradient.to_local().normal_(generator=generator)
        parameter.grad = gradient
    policy.optimizer.step()
    policy.updates += 1


def gathered(policy: Policy) -> dict[str, Any]:
    """Everything by torch's own functions; on the first rank."""
    weights = get_model_state_dict(policy.model, options=WHOLE)
    whole = get_optimizer_state_dict(policy.model, policy.optimizer, options=WHOLE)
    if not weights:
        return {}
    state = whole["state"]
    return {
        "weights": {name: one.clone() for name, one in checkpoint_tensors(policy.model, weights).items()},
        "moments": {f"{m}.{name}": own[m] for name, own in state.items() for m in ("exp_avg", "exp_avg_sq")},
        "steps": {name: float(own["step"]) for name, own in state.items()},
    }


def leave_in_all_ways(policy: Policy, here: Ranks, model: pathlib.Path, folder: pathlib.Path) -> None:
    for way, settings in (
        ("folder", {"kind": "vllm_http", "dtype": "float32"}),
        ("shared memory", {"kind": "vllm", "dtype": "bfloat16"}),
        ("embedded engine", {"kind": "embedded", "dtype": "bfloat16"}),
    ):
        sync = engine = None
        if here.is_first:
            engine_config = EngineConfig(weights=str(folder), **settings)
            sync = WeightSync(engine_config, policy.model, policy.router_names)
            engine = EmbeddedEngine(model, dtype=torch.bfloat16) if way == "embedded engine" else None
        with costing(way), lending(policy, here) as lent:
            if lent is not None and sync is not None:
                if engine is not None:
                    sync.push(engine, lent.weights, 1)
                else:
                    source: Any = sync.source(lent.weights, 1)
                del lent
        if sync is None:
            continue
        if way == "folder":
            shutil.copytree(source, folder / "folder")
        elif way == "shared memory":
            torch.save({name: one.clone() for name, one in open_source(source.info())}, folder / "shared.pt")
        elif engine is not None:
            engine.close()
        sync.close()


def main(model: pathlib.Path, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    config: TrainConfig = load_config(None, [f"model.path={model}", "optimizer.lr=1e-2", f"output={folder / 'run'}"])
    here = join(config)
    with costing("start"):
        policy = Policy(config, here, model)
    update(policy)
    expected = gathered(policy)
    leave_in_all_ways(policy, here, model, folder)
    with costing("checkpoint"):
        checkpoints.save(policy, Progress(step=1, updates=1), load_tokenizer(model), folder, 1, here)
    written = folder / checkpoints.FOLDER / "step_000001"
    with costing("resume"):
        resumed = Policy(config, here, written)
        checkpoints.restore(resumed, written)
    again = gathered(resumed)
    whole = read_model(model, config.model)
    pairs = zip(resumed.model.named_buffers(), whole.named_buffers(), strict=True)
    again["buffers_equal"] = all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    if here.is_first:
        torch.save(expected, folder / "expected.pt")
        torch.save(again, folder / "resumed.pt")
        shutil.copytree(written, folder / "checkpoint")
    (folder / f"costs_{here.rank}.json").write_text(json.dumps(costs))
    leave(here)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
