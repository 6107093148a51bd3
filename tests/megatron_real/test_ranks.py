"""Two and four processes over gloo with the real megatron-core: EP, TP with SP, PP, VPP, with and without recompute."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch

from tests.megatron_real import ranks, tiny
from tests.megatron_real.test_one_rank import same
from tests.megatron_real.test_scoring import close

ROOT = pathlib.Path(__file__).resolve().parents[2]
divisions = pytest.mark.parametrize("name", list(ranks.DIVISIONS))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each process saved, by the number of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    return {world: run_ranks(folder, world) for world in (2, 4)}


def run_ranks(folder: pathlib.Path, world: int) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.megatron_real.ranks", str(folder), str(rank), str(world)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=500) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}of{world}.pt", weights_only=False) for rank in range(world)]


def all_of(found: dict[int, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [one[name] for one in found[ranks.DIVISIONS[name].world]]


@divisions
def test_record_changes_nothing_and_its_own_rows_replay_to_the_bit(found: Any, name: str) -> None:
    for one in all_of(found, name):
        same(one["recorded step"], one["live"])
        same(one["own step"], one["live"])
        same(one["live again"], one["live"])  # after forced, failed and forward-only blocks
        assert one["own stats"].agreement == (1.0,) * len(one["spec"].layers)


@divisions
def test_recorded_rows_of_all_ranks_are_those_of_one_process(found: Any, name: str) -> None:
    division = ranks.DIVISIONS[name]
    tiny.start()
    chunks = tiny.megatron_model(ranks.hf_of(division))
    replayer = ranks.MegatronReplay(chunks)
    with replayer.record() as recording:
        tiny.train_step(chunks, tiny.tokens(ranks.MICRO_BATCHES, ranks.SEQUENCES))
    alone = recording.gather()
    for rank, one in enumerate(all_of(found, name)):
        assert one["spec"] == replayer.spec
        for got, expected in zip(one["recorded"], ranks.own(alone, division, rank), strict=True):
            assert got.same_sets(expected)


@divisions
def test_forced_rows_are_used_exactly_and_missing_rows_route_live(found: Any, name: str) -> None:
    division = ranks.DIVISIONS[name]
    for rank, one in enumerate(all_of(found, name)):
        assert one["forced used"] == ranks.own(ranks.forced(one["spec"]), division, rank)
        routes = ranks.own(ranks.forced(one["spec"], missing=True), division, rank)
        for used, given in zip(one["missing used"], routes, strict=True):
            assert np.array_equal(used.ids[given.captured], given.ids[given.captured])
        layers = len(one["spec"].layers)
        assert one["forced stats"].rows_replayed == (ranks.MICRO_BATCHES * ranks.TOKENS,) * layers
        assert one["missing stats"].rows_live == (ranks.MICRO_BATCHES * 3,) * layers
        assert one["missing stats"].rows_replayed == (ranks.MICRO_BATCHES * (ranks.TOKENS - 3),) * layers


@divisions
def test_gradients_equal_those_of_transformers_in_one_process(found: Any, name: str) -> None:
    for one in all_of(found, name):
        for mine, expected in zip(one["missing step"].gradients, one["gradients of transformers"], strict=True):
            assert mine.keys() == expected.keys()
            for parameter, gradient in mine.items():
                close(gradient, expected[parameter])


@pytest.mark.parametrize(
    "name", ["expert", "tensor", "expert tensor", "pipeline", "virtual pipeline", "tensor and pipeline"]
)
def test_recompute_gives_the_same_gradients_to_the_bit(found: Any, name: str) -> None:
    """A recompute with the rows of another micro-batch keeps the loss and changes the router's gradients."""
    for plain, recomputed in zip(all_of(found, name), all_of(found, f"{name}, recompute"), strict=True):
        for step in ("forced step", "missing step", "own step"):
            same(recomputed[step], plain[step])


PIPELINES = [f"{name}{kind}" for name in ("pipeline", "virtual pipeline") for kind in ("", ", recompute")]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_forgotten_switch_is_harmless_with_install(found: Any, name: str) -> None:
    """Alone, Megatron's calls then recompute with the rows of a later micro-batch: equal losses, wrong gradients."""
    wrong = []
    for one in all_of(found, name):
        same(one["native step"], one["forced step"])
        same(one["forgotten switch, installed"], one["forced step"])
        alone = one["forgotten switch"]
        assert all(torch.equal(a, b) for a, b in zip(alone.losses, one["forced step"].losses, strict=True))
        for got, right in zip(alone.gradients, one["forced step"].gradients, strict=True):
            wrong += [parameter for parameter in right if not torch.equal(got[parameter], right[parameter])]
    assert any("router" in parameter for parameter in wrong) == ("recompute" in name)


@divisions
def test_a_rank_gets_the_rows_of_its_own_layers_and_tokens_only(found: Any, name: str) -> None:
    spec = all_of(found, name)[0]["spec"]
    total = ranks.MICRO_BATCHES * ranks.TOKENS * spec.row_bytes
    shares = [one["bytes"] for one in all_of(found, name)]
    assert sum(shares) == total
    for one, share in zip(all_of(found, name), shares, strict=True):
        layers = len(one["layout"].layers) / len(spec.layers)
        tokens = 1 if one["layout"].parts == 1 and "pipeline" in name else 1 / 2
        assert share == total * layers * tokens
        same(one["share step"], one["forced step"])


@divisions
def test_the_depth_of_the_schedule_bounds_the_rows_on_the_device(found: Any, name: str) -> None:
    for rank, one in enumerate(all_of(found, name)):
        chunks = sum(bool(gradients) for gradients in one["live"].gradients)
        depth = 1
        if "pipeline, recompute" in name:  # ranks of the first stage come first
            depth = 2 * chunks if "virtual" in name else 2 - rank * 2 // ranks.DIVISIONS[name].world
        for kind in ("forced", "missing"):
            assert one[f"{kind} held"] <= depth
            assert one[f"{kind} left"] == 0


@divisions
def test_every_rank_refuses_bad_rows_before_the_schedule(found: Any, name: str) -> None:
    for one in all_of(found, name):
        count, length, model, nothing = one["refused"]
        assert "the schedule runs" in count
        assert "got 3" in count or "got 1" in count
        assert "2 sequences of 8 tokens, the routes have 14 rows" in length or "multiple of" in length
        assert "another model" in model
        assert "the schedule runs" in nothing or "needs routes" in nothing


def test_layers_are_found_by_their_number_on_every_stage(found: Any) -> None:
    def layers(name: str) -> list[tuple[int, ...]]:
        return [one["layout"].layers for one in all_of(found, name)]

    assert layers("pipeline") == [(1,), (2, 3)]
    assert layers("pipeline, no router on the first stage") == [(), (2, 3)]
    assert layers("virtual pipeline") == [(2,), (1, 3)]  # chunks of one layer: 0 and 2, 1 and 3
    assert layers("tensor") == [(1, 2, 3), (1, 2, 3)]
    assert layers("tensor and pipeline") == [(1,), (1,), (2, 3), (2, 3)]
