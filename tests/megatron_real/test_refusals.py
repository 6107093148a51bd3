"""One process with the real megatron-core on the CPU: the rows, models and settings that replay refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch

from router_replay import Routes, Sample, pack
from router_replay.batch.megatron import MegatronLayout
from router_replay.errors import ReplayError
from router_replay.replay.megatron import MegatronReplay
from tests.makers import random_routes
from tests.megatron_real import tiny


@pytest.fixture(scope="module")
def hf() -> Any:
    tiny.start()
    return tiny.hf_model()


def test_rows_that_do_not_fit_are_refused_before_the_schedule(hf: Any) -> None:
    chunks = tiny.megatron_model(hf)
    replayer = MegatronReplay(chunks)
    good = random_routes(16, replayer.spec)
    other = random_routes(16, tiny.RouterSpec(8, 2, (0, 1, 2)))
    shape = {"micro_batch_size": 2, "seq_length": 8, "num_microbatches": 1}
    for routes, message in [
        (random_routes(14, replayer.spec), "micro-batch 0: the schedule runs 2 sequences of 8 tokens.* 14 rows"),
        ([good, good], "the schedule runs 1, got 2"),
        (other, r"micro-batch 0: these routes are of another model.*\(1, 2, 3\).*\(0, 1, 2\)"),
        (None, "replay.. needs routes"),
        ([], "the schedule runs 1, got 0"),
        (Routes.missing(16, replayer.spec), "none of the rows"),
        (random_routes(15, replayer.spec), "micro-batch 0: a micro-batch of 2 sequences"),
    ]:
        with pytest.raises(ReplayError, match=message), replayer.replay(routes, **shape):
            raise AssertionError("the block must not open")
    missing = tiny.with_missing(good, [3])
    with (
        pytest.raises(ReplayError, match="micro-batch 0: 1 rows that bear loss are missing, the first is row 3"),
        replayer.replay(missing, **shape, loss_mask=np.ones(16)),
    ):
        pass


def test_a_share_of_another_stage_rank_or_model_is_refused(hf: Any) -> None:
    replayer = MegatronReplay(tiny.megatron_model(hf))
    routes = random_routes(16, replayer.spec)
    wide = tiny.RouterSpec(9, 2, replayer.spec.layers)
    other_part = MegatronLayout((1, 2, 3), part=1, parts=2)
    for share, message in [
        (MegatronLayout((2, 3)).share(routes, 2), r"rank or model: expected the layers \(1, 2, 3\), got \(2, 3\)"),
        (MegatronLayout(()).share(routes, 2), r"rank or model: expected the layers \(1, 2, 3\), got \(\)"),
        (replayer.layout.share(random_routes(16, wide), 2), "rank or model"),
        (other_part.share(routes, 2), r"rank: expected .*parts=1.*got .*part=1, parts=2"),
    ]:
        with (
            pytest.raises(ReplayError, match=f"micro-batch 0: this Share was cut for another {message}"),
            replayer.replay(share, micro_batch_size=2),
        ):
            raise AssertionError("the block must not open")


def test_a_part_of_a_batch_is_refused(hf: Any) -> None:
    replayer = MegatronReplay(tiny.megatron_model(hf))
    sample = Sample(np.arange(8), np.zeros(8), np.ones(8, bool), random_routes(8, replayer.spec))
    batch = pack([sample], max_tokens=8)
    for part in (batch.shard(0, 2), batch.split(2)[0]):
        with pytest.raises(ReplayError, match="micro-batch 0: expected the whole micro-batch"), replayer.replay(part):
            pass


def test_rows_of_another_shape_are_refused_by_the_first_router(hf: Any) -> None:
    chunks = tiny.megatron_model(hf)
    replayer = MegatronReplay(chunks)
    for routes, size, message in [
        (random_routes(14, replayer.spec), 2, "layer 1, micro-batch 0: the router got 8 positions of 2 .* 7 positions"),
        (random_routes(16, replayer.spec), 1, "8 positions of 2 sequences.* 16 positions of 1 sequences"),
    ]:
        with pytest.raises(ReplayError, match=message), replayer.replay(routes, micro_batch_size=size):
            tiny.train_step(chunks, tiny.tokens(1))


def test_every_row_must_be_used_as_often_as_it_must(hf: Any) -> None:
    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE["full"])
    replayer = MegatronReplay(chunks)
    routes = [random_routes(16, replayer.spec, seed) for seed in range(2)]

    def half_way() -> None:
        first, _ = [tiny.forward(chunks[0], batch).sum() for batch in tiny.tokens(2)]
        first.backward()

    cases: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
        (
            r"layers \[1, 2, 3\] .* did not use the rows of micro-batch 1: 2 micro-batches were given",
            {},
            lambda: tiny.train_step(chunks, tiny.tokens(1)),
        ),
        (
            "chunk 0 runs forward pass 3 in this block, which was given 2",
            {},
            lambda: tiny.train_step(chunks, tiny.tokens(3)),
        ),
        (
            "layer 1, micro-batch 1: the rows were used in 0 recomputes of backward, expected 1",
            {},
            half_way,
        ),
        (
            "layer 1, micro-batch 0: the rows were used in 0 recomputes of backward, expected 1",
            {"forward_only": False},
            lambda: tiny.train_step(chunks, tiny.tokens(2), forward_only=True),
        ),
    ]
    for message, arguments, run in cases:
        with pytest.raises(ReplayError, match=message), replayer.replay(routes, micro_batch_size=2, **arguments):
            run()


def test_a_router_that_is_bypassed_raises(hf: Any) -> None:
    chunks = tiny.megatron_model(hf)
    replayer = MegatronReplay(chunks)
    router = chunks[0].decoder.layers[2].mlp.router
    router.forward = lambda hidden, mask=None: type(router).routing(router, router.gating(hidden))
    with (
        pytest.raises(ReplayError, match=r"the routers of layers \[2\] did not ask for experts"),
        replayer.replay(random_routes(16, replayer.spec), micro_batch_size=2),
    ):
        tiny.train_step(chunks, tiny.tokens(1))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_expert_capacity_factor", 1.0),
        ("cuda_graph_impl", "local"),
        ("overlap_moe_expert_parallel_comm", True),
        ("hybrid_context_parallel", True),
        ("moe_router_force_load_balancing", True),
    ],
)
def test_settings_that_bypass_replay_are_refused_at_the_start(hf: Any, setting: str, value: Any) -> None:
    chunks = tiny.megatron_model(hf)
    setattr(chunks[0].config, setting, value)
    with pytest.raises(ReplayError, match=f"cannot be replayed with {setting}="):
        MegatronReplay(chunks)


def test_what_is_not_the_chunks_of_one_model_is_refused(hf: Any) -> None:
    (chunk,) = tiny.megatron_model(hf)
    for chunks, message in [
        ([], "got an empty list"),
        (["model"], "got str"),
        ([chunk, chunk], "this rank has 1 model chunks .* got 2"),
        (
            torch.nn.Linear(2, 2),
            "expected one module whose `decoder` is a TransformerBlock, got 0 in a Linear",
        ),
        (tiny.megatron_model(tiny.hf_model(mlp_only_layers=[0, 1, 2, 3])), "no router"),
    ]:
        with pytest.raises(ReplayError, match=message):
            MegatronReplay(chunks)
    both = torch.nn.ModuleList([chunk, tiny.megatron_model(hf)[0]])
    with pytest.raises(ReplayError, match="got 2 with routers"):
        MegatronReplay([torch.nn.Sequential(*both)])
