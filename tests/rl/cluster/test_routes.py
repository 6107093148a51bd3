"""Routes in Ray's object store: the same weights to the bit, only the rows that are read, and nothing that stays."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

import ray

from router_replay import RouterSpec, Routes, Sample
from router_replay.batch import RowSpans
from router_replay.errors import TrainError
from router_replay.rl.cluster import routes as stored_routes
from router_replay.rl.cluster.driver import _connected
from router_replay.rl.cluster.routes import POST, PostActor, RayPost, StoredRoutes, keep, keeper
from router_replay.rl.config import TrainConfig, load_config
from router_replay.rl.policy import delivery
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks
from tests.makers import random_routes
from tests.rl.policy.test_policy import samples

SPEC = RouterSpec(num_experts=128, top_k=8, layers=tuple(range(16)))
ONE = Ranks(0, 1, 1, torch.device("cpu"))


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    """Ray with a post, and the smallest object store that Ray can have."""
    with _connected(load_config(None, ["cluster.kind=ray", "cluster.object_store_bytes=78643200"])):
        actor = ray.remote(PostActor).options(name=POST, num_cpus=0).remote()
        yield
        del actor


def used() -> int:
    return int(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.parametrize("codec", ["dense", "sets"])
def test_a_part_is_read_without_the_rest(codec: str) -> None:
    routes = random_routes(4096, SPEC).sorted()
    source = keep(routes, codec)
    assert source.read() == routes
    assert source.read(300, 400) == routes[300:400]
    assert source.read(300, 400, (3, 4)) == routes[300:400].select_layers((3, 4))
    whole, part = source.open(), source.open()
    whole.read()
    part.read(300, 400, (3, 4))
    assert part.bytes_read < whole.bytes_read / (40 if codec == "sets" else 6)


def test_an_update_has_the_same_weights_to_the_bit(
    make_config: Callable[..., TrainConfig], random_model: pathlib.Path
) -> None:
    """The stored samples go the whole way: store, message, post, and the tensors of a pass."""
    weights = []
    for stored in (False, True):
        policy = Policy(make_config("replay=r3"), ONE, random_model)
        given = samples(policy)
        put = keeper(make_config(), policy.spec)
        if stored:
            given = [dataclasses.replace(one, routes=put(one.routes.read())) for one in given if one.routes is not None]
        sources: list[Any] = []
        message = delivery.encode(delivery.plan([given, given[:2]], ONE, 16, "raise")[0], sources)
        assert len(sources) == (3 if stored else 0)
        RayPost().send([[], sources])
        minis = delivery.decode(bytes(message), lambda: RayPost().receive(1))
        assert {type(micro.routes) for mini in minis for micro in mini.micro} == {RowSpans if stored else Routes}
        for mini in minis:
            policy.update(mini, policy.score(mini))
        assert set(policy.route_counts().rows_live) == {0}
        weights.append({name: tensor.clone() for name, tensor in policy.model.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_nothing_stays_in_the_store_when_the_step_is_over() -> None:
    """A reference that travelled in a message of its own would be held for ever."""
    gc.collect()
    before = used()
    made = [keep(random_routes(2000, SPEC, seed)) for seed in range(8)]
    sent = [Sample(np.zeros(2000, int), np.zeros(2000), np.ones(2000, bool), one) for one in made]
    ranks = Ranks(0, 2, 1, torch.device("cpu"))
    plans = delivery.plan([sent], ranks, 4000, "live")
    sources: list[Any] = []
    message = bytes(delivery.encode(plans[1], sources))
    RayPost().send([[], sources])
    [mini] = delivery.decode(message, lambda: RayPost().receive(1))
    rows = [micro.to_torch().routes for micro in mini.micro]
    assert sum(len(one) for one in rows if one is not None) == 4 * 2000  # half of the rows
    until(lambda: used() - before > 8 * 2000 * 16 * 8)
    gc.disable()  # nothing may wait for the garbage collector
    try:
        del made, sent, plans, sources, mini
        until(lambda: used() <= before)
    finally:
        gc.enable()
    assert rows[0] is not None  # the rows that were read do not need the store


def test_a_full_store_loses_nothing() -> None:
    """Three times what fits, and some of it in use, so that Ray cannot move it."""
    blobs = [random_routes(100_000, SPEC, seed) for seed in range(2)]
    kept = [keep(blobs[number % 2]) for number in range(18)]
    in_use = [ray.get(one.reference) for one in kept[:4]]
    kept += [keep(blobs[number]) for number in range(2)]
    assert sum(len(ray.get(one.reference)) for one in kept) > 3 * 78643200
    assert all(one.read(99_000) == blobs[number % 2][99_000:] for number, one in enumerate(kept))
    assert len(in_use[0]) > 100_000 * 16 * 8


def test_who_waits_for_room_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    put, refused = ray.put, []

    def full(blob: Any) -> Any:
        if not caplog.messages:
            refused.append(blob)
            raise ray.exceptions.ObjectStoreFullError
        return put(blob)

    monkeypatch.setattr(ray, "put", full)
    monkeypatch.setattr(stored_routes, "MESSAGE_SECONDS", 0.05)
    monkeypatch.setattr(stored_routes, "ROOM_SECONDS", 0.01)
    routes = random_routes(10, SPEC)
    assert keep(routes).read() == routes
    assert refused
    assert "bytes of routes in Ray's object store" in caplog.messages[0]
    assert "the trainer ranks free some at the end of their step" in caplog.messages[0]


def test_routes_that_are_gone_are_named() -> None:
    @ray.remote
    class Owner:
        def make(self) -> StoredRoutes:
            return keep(random_routes(10, SPEC))

    owner = Owner.options(num_cpus=0).remote()
    source = ray.get(owner.make.remote())
    ray.kill(owner)
    with pytest.raises(TrainError, match=r"not in Ray's object store any more.*has ended"):
        until(lambda: source.read() is None)


def test_references_are_handed_out_once() -> None:
    RayPost().send([[], [keep(random_routes(3, SPEC))]])
    assert len(RayPost().receive(1)) == 1
    with pytest.raises(TrainError, match="lost the references to the routes of rank 1"):
        RayPost().receive(1)
