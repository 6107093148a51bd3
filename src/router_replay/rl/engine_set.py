"""Start all engines of a run as one, and give each of them the new weights in its own form.

    engines = EngineSet(config, policy.model, router_names, policy.gpu)
    engine = engines.start(state, spec, version=0)    # one engine, or an EnginePool of several
    engines.push(engine, state, version=1)

With `cluster.kind = "ray"`, an engine without a URL is a process of its own (`cluster/engines.py`). An engine behind a
URL is always connected from here.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from router_replay.engines.base import Engine, WeightSource
from router_replay.engines.pool import EnginePool
from router_replay.engines.types import InFlight
from router_replay.rl.config import EngineConfig, TrainConfig
from router_replay.rl.engine_start import check_engine, start_engine
from router_replay.rl.weights.sync import WeightSync
from router_replay.rl.weights.ways import WORDS
from router_replay.spec import RouterSpec

PATIENCE = 60.0
"""Seconds that requests wait for an engine if none answers."""
RESTART_PATIENCE = 300.0
"""Seconds that requests wait if none answers and engines that died start again."""


class EngineSet:
    """Hold what the engines of a run need of the policy. Only the first rank has this object.

    `model` is the policy's model, and `routers` are the names of its modules that route. `gpu` is the number of the GPU
    that the first rank computes on, or None for a CPU. Engines that load the same files share them. After `start`, the
    attribute `ways` says in words how new weights reach each engine.
    """

    def __init__(self, config: TrainConfig, model: Any, routers: frozenset[str], gpu: int | None = None) -> None:
        self._config, self._gpu = config, gpu
        self.ways: dict[str, str] = {}
        self._syncs: dict[tuple[str, ...], WeightSync] = {}
        self._folders: dict[tuple[str, ...], str] = {}  # the weights that an engine starts with
        self._version = 0
        self._closing = contextlib.ExitStack()
        float32_routers = config.model.router_dtype == "float32"
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._closing.close)
            for table in config.all_engines.values():
                if _form(table) not in self._syncs:
                    sync = WeightSync(table, model, routers, float32_routers=float32_routers)
                    self._closing.callback(sync.close)
                    self._syncs[_form(table)] = sync
            on_failure.pop_all()

    def start(self, state: Mapping[str, torch.Tensor], spec: RouterSpec, version: int) -> Engine:
        """Start every engine with the weights of `state` as `version`, and return them as one engine.

        `spec` describes the routers of the policy, which those of the engines must equal.
        """
        tables, self._version = self._config.all_engines, version
        self._folders = {form: str(sync.export(state, version)) for form, sync in self._syncs.items()}
        starts = {name: self._how_to_start(name, table, spec) for name, table in tables.items()}
        engines: dict[str, Engine] = {}
        with contextlib.ExitStack() as on_failure, ThreadPoolExecutor(len(tables)) as threads:
            elsewhere = {name: threads.submit(starts[name]) for name in self._restartable}
            for name in tables:
                engines[name] = elsewhere[name].result() if name in elsewhere else starts[name]()
                on_failure.callback(engines[name].close)
            self._prepare(engines, state)
            if not self._pooled:
                on_failure.pop_all()
                return engines.popitem()[1]
            patience = RESTART_PATIENCE if self._restartable else PATIENCE
            pool = EnginePool(engines, connect={name: starts[name] for name in self._restartable}, patience=patience)
            on_failure.pop_all()
        return pool

    def push(
        self, engine: Engine, state: Mapping[str, torch.Tensor], version: int, in_flight: InFlight = "abort"
    ) -> None:
        """Load the weights of `state` as `version` into `engine`, which `start` returned.

        `in_flight` says what happens to running requests. Files of older versions are removed.
        """
        if not isinstance(engine, EnginePool):
            [sync] = self._syncs.values()
            sync.push(engine, state, version, in_flight)
            return
        tables, by_folder = self._config.all_engines, self._by_folder
        # An engine that returned meanwhile would read from the memory in which the next version is being written.
        with engine.without_returns():
            sources: dict[tuple[str, ...], WeightSource] = {
                form: sync.source(state, version, as_folder=form in by_folder) for form, sync in self._syncs.items()
            }
            self._folders |= {form: str(sources[form]) for form in by_folder}
            self._version = version
            engine.update_weights(lambda name: sources[_form(tables[name])], version, in_flight)
        for sync in self._syncs.values():
            sync.remove_older(version)

    def close(self) -> None:
        """Remove the files and the memory of the weights. The engines must be closed before."""
        self._closing.close()

    @property
    def by_cuda_ipc(self) -> float:
        """Return the share of the engines that get new weights by CUDA IPC."""
        tables = self._config.all_engines
        return sum(self._syncs[_form(table)].way == "cuda_ipc" for table in tables.values()) / len(tables)

    def _prepare(self, engines: Mapping[str, Engine], state: Mapping[str, torch.Tensor]) -> None:
        """Choose how new weights reach these running engines; those of one form get them in the same way."""
        forms = {name: _form(table) for name, table in self._config.all_engines.items()}
        for form, sync in self._syncs.items():
            own = [name for name in forms if forms[name] == form]
            if form in self._by_folder:
                words = WORDS["folder"]
            else:
                words = sync.prepare([engines[name] for name in own], state, self._gpu)
            self.ways |= dict.fromkeys(own, words)

    @property
    def _pooled(self) -> bool:
        return len(self._config.all_engines) > 1 or bool(self._restartable)

    @property
    def _by_folder(self) -> set[tuple[str, ...]]:
        """Return the forms of engines that get a folder whatever their kind.

        The tensors of an engine in this process are lent for the time of a push only. An engine that does not answer
        then loads them later, so of several engines each gets a folder, or the memory that all share.
        """
        tables = self._config.all_engines
        found = {_form(tables[name]) for name in self._restartable}
        return found | {_form(table) for table in tables.values() if table.kind == "embedded" and self._pooled}

    @property
    def _restartable(self) -> list[str]:
        """Return the engines that are processes of their own, which start again after they died."""
        if self._config.cluster.kind != "ray":
            return []
        return [name for name, table in self._config.all_engines.items() if table.kind not in table.behind_url]

    def _how_to_start(self, name: str, table: EngineConfig, spec: RouterSpec) -> Callable[[], Engine]:
        """Return the function that starts this engine, with the weights that are the newest when it is called."""
        config, form = self._config, _form(table)

        def start() -> Engine:
            folder = pathlib.Path(self._folders[form])
            if name not in self._restartable:
                return start_engine(config, folder, spec, self._version, table)
            from router_replay.rl.cluster.engines import RayEngine

            engine = RayEngine(name, config, folder, spec, self._version)
            try:
                check_engine(config, engine, spec)
            except BaseException:
                engine.close()
                raise
            return engine

        return start


def _form(table: EngineConfig) -> tuple[str, ...]:
    """Return what decides in which form an engine gets its weights."""
    inside = "" if table.kind in table.behind_url else table.kind
    return inside, table.dtype, table.quantize, table.weights, table.transfer
