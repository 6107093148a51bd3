"""One process with the real megatron-core on the CPU: replay, record, recompute, padding, and what is left alone."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay as NativeReplay
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from router_replay import Routes, Sample, pack
from router_replay.errors import ReplayError
from router_replay.replay.megatron import MegatronReplay
from router_replay.replay.megatron.site import MicroBatchPlan
from tests.makers import random_ids, random_routes
from tests.megatron_real import tiny

recompute = pytest.mark.parametrize("kind", list(tiny.RECOMPUTE))


@pytest.fixture(scope="module")
def hf() -> Any:
    tiny.start()
    return tiny.hf_model()


def same(one: tiny.Step, other: tiny.Step) -> None:
    """Assert that two steps are equal to the bit."""
    assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


# -- record and replay --------------------------------------------------------------------------------------


@recompute
def test_record_changes_nothing_and_its_own_rows_replay_to_the_bit(hf: Any, kind: str) -> None:
    chunks, batches = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind]), tiny.tokens(2)
    before = tiny.train_step(chunks, batches)
    replayer = MegatronReplay(chunks, agreement=True)
    same(tiny.train_step(chunks, batches), before)
    with replayer.record() as recording:
        same(tiny.train_step(chunks, batches), before)
    with replayer.replay(recording, micro_batch_size=2):
        same(tiny.train_step(chunks, batches), before)
    with replayer.replay(recording.gather(), micro_batch_size=2):
        same(tiny.train_step(chunks, batches), before)
    assert replayer.stats.agreement == (1.0, 1.0, 1.0)
    assert replayer.stats.rows_replayed == (64, 64, 64)
    assert replayer.stats_of_all_ranks() == replayer.stats


@recompute
def test_forced_rows_reach_the_experts_and_a_recompute_gives_the_same_gradients(hf: Any, kind: str) -> None:
    batches = tiny.tokens(3)
    plain = tiny.megatron_model(hf)
    replayer = MegatronReplay(plain)
    routes = [random_routes(16, replayer.spec, seed) for seed in range(3)]
    with replayer.replay(routes, micro_batch_size=2), replayer.record() as recording:
        expected = tiny.train_step(plain, batches)
    assert recording.gather() == routes

    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind])
    replayer = MegatronReplay(chunks)
    maps = watch_maps(chunks[0])
    with replayer.replay(routes, micro_batch_size=2):
        same(tiny.train_step(chunks, batches), expected)
    ids = routes[0].ids.reshape(2, 8, 3, 2).transpose(1, 0, 2, 3).reshape(16, 3, 2)  # megatron's order: [s, b]
    wanted = np.zeros((3, 16, 8), bool)
    np.put_along_axis(wanted, ids.transpose(1, 0, 2).astype(int), True, axis=2)
    for number, layer in enumerate((1, 2, 3)):
        assert np.array_equal(maps[layer][0].numpy(), wanted[number])


def watch_maps(chunk: Any) -> dict[int, list[Tensor]]:
    """The routing maps that reach the experts, per layer, in the order of the calls."""
    maps: dict[int, list[Tensor]] = {}
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            found = maps.setdefault(layer.layer_number - 1, [])
            layer.mlp.router.register_forward_hook(lambda module, args, out, found=found: found.append(out[1]))
    return maps


@recompute
def test_missing_rows_are_routed_live_row_by_row(hf: Any, kind: str) -> None:
    chunks, batches = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind]), tiny.tokens(1)
    replayer = MegatronReplay(chunks)
    forced = random_routes(16, replayer.spec)
    routes = tiny.with_missing(forced, [0, 5, 15])
    with replayer.replay(routes, micro_batch_size=2), replayer.record() as recording:
        step = tiny.train_step(chunks, batches)
    used = recording.routes
    known = [row for row in range(16) if row not in (0, 5, 15)]
    assert np.array_equal(used.ids[known], forced.ids[known])
    assert not np.array_equal(used.ids, forced.ids)
    assert replayer.stats.rows_live == (3, 3, 3)
    with replayer.replay(used, micro_batch_size=2):  # the same experts, all forced, give the same bits
        same(tiny.train_step(chunks, batches), step)


def test_a_recompute_takes_the_experts_that_live_rows_used_and_does_not_choose_again(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE["full"])
    replayer = MegatronReplay(chunks)
    routes = tiny.with_missing(random_routes(16, replayer.spec), [0, 5, 15])
    in_backward = []
    topk = torch.topk

    def counted(*args: Any, **kwargs: Any) -> Any:
        in_backward.append(torch._C._current_graph_task_id() != -1)
        return topk(*args, **kwargs)

    monkeypatch.setattr(moe_utils.torch, "topk", counted)
    with replayer.replay(routes, micro_batch_size=2):
        tiny.train_step(chunks, tiny.tokens(1))
    assert in_backward == [False] * 3  # one live choice per layer, none in its recompute


def test_a_packed_batch_brings_its_rows_micro_batch_by_micro_batch(hf: Any) -> None:
    chunks = tiny.megatron_model(hf)
    replayer = MegatronReplay(chunks)
    samples = []
    for number, length in enumerate((8, 6)):
        captured = np.arange(length) < length - 1
        routes = Routes(random_ids(length, replayer.spec, number), replayer.spec, captured=captured)
        samples.append(Sample(np.arange(length) + number, np.zeros(length), np.arange(length) > 2, routes))
    batch = pack(samples, max_tokens=8, pad_to_multiple_of=4)
    rows = [torch.from_numpy(np.append(one.token_ids, 0))[None] for one in batch.bins()]
    with replayer.replay(batch, num_microbatches=2, seq_length=8), replayer.record() as recording:
        tiny.train_step(chunks, rows)
    for one, used in zip(batch.bins(), recording.gather(), strict=True):
        assert one.routes is not None
        assert np.array_equal(used.ids[one.routes.captured], one.routes.ids[one.routes.captured])
    assert replayer.stats.rows_replayed == (7 + 5,) * 3
    assert replayer.stats.rows_live == (0,) * 3  # the last tokens and the padding predict nothing


def test_agreement_counts_equal_sets_per_layer(hf: Any) -> None:
    chunks, batches = tiny.megatron_model(hf), tiny.tokens(1)
    replayer = MegatronReplay(chunks, agreement=True)
    with replayer.record() as recording:
        tiny.train_step(chunks, batches)
    ids = recording.routes.ids.copy()
    ids[:4, 2] = (ids[:4, 2] + 1) % 8  # the last layer: other layers keep their inputs
    ids[4:, :] = ids[4:, :, ::-1]  # the order of slots is no difference
    with replayer.replay(Routes(ids, replayer.spec), micro_batch_size=2):
        tiny.train_step(chunks, batches)
    assert replayer.stats.agreement is not None
    assert replayer.stats.agreement[:2] == (1.0, 1.0)
    assert 0.75 <= replayer.stats.agreement[2] < 1.0


# -- what every block leaves behind -------------------------------------------------------------------------


@recompute
def test_a_failure_in_the_schedule_leaves_nothing(hf: Any, kind: str) -> None:
    chunks, batches = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind]), tiny.tokens(2)
    replayer = MegatronReplay(chunks)
    live = tiny.train_step(chunks, batches)
    routes = [random_routes(16, replayer.spec, seed) for seed in range(2)]
    with replayer.replay(routes, micro_batch_size=2):
        forced = tiny.train_step(chunks, batches)

    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("the second micro-batch fails")

    with (
        pytest.raises(RuntimeError, match="second micro-batch"),
        replayer.replay(routes, micro_batch_size=2),
        replayer.record(),
    ):
        tiny.train_step(chunks, batches, during=fail)
    same(tiny.train_step(chunks, batches), live)
    with replayer.replay(routes, micro_batch_size=2):
        tiny.train_step(chunks, batches, forward_only=True)
    same(tiny.train_step(chunks, batches), live)
    with replayer.replay(routes, micro_batch_size=2):
        same(tiny.train_step(chunks, batches), forced)


def test_the_backward_pass_may_run_after_the_block(hf: Any) -> None:
    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE["full"])
    (batch,) = tiny.tokens(1)
    replayer = MegatronReplay(chunks)
    routes = random_routes(16, replayer.spec)
    with replayer.replay(routes, micro_batch_size=2):
        tiny.forward(chunks[0], batch).sum().backward()
    expected = tiny.gradients(chunks[0])
    chunks[0].zero_grad()
    with replayer.replay(routes, micro_batch_size=2):
        loss = tiny.forward(chunks[0], batch).sum()
    loss.backward()
    got = tiny.gradients(chunks[0])
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("kind", "most"), [("none", 1), ("full", 1)])
def test_the_rows_of_a_micro_batch_leave_the_device_after_its_last_use(
    hf: Any, kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[MicroBatchPlan] = weakref.WeakSet()
    made, dtypes = MicroBatchPlan.of, set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        plan = made(*args, **kwargs)
        dtypes.add(plan.ids_TLK.dtype)
        alive.add(plan)
        return plan

    monkeypatch.setattr(MicroBatchPlan, "of", watched)
    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind])
    replayer = MegatronReplay(chunks)
    held: list[int] = []
    routes = [random_routes(16, replayer.spec, seed) for seed in range(4)]
    with replayer.replay(routes, micro_batch_size=2):
        tiny.train_step(chunks, tiny.tokens(4), during=lambda number: held.append(len(alive)))
    assert max(held) <= most
    assert not alive
    assert dtypes == {torch.uint8}


class Storages(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within the block, as long as each is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(storage) for storage in storages((args, kwargs))}  # a view is nothing new
        for storage in storages(out):
            if id(storage) not in self.known | given:
                self.known.add(id(storage))
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.freed, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("scores", ["softmax of the chosen", "softmax of all", "sigmoid"])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_replay_needs_no_more_memory_than_its_ids_and_one_widened_column(hf: Any, kind: str, scores: str) -> None:
    changes = {
        "softmax of the chosen": {},
        "softmax of all": {"moe_router_pre_softmax": True},
        "sigmoid": {"moe_router_score_function": "sigmoid"},
    }[scores]
    chunks = tiny.megatron_model(hf, **tiny.RECOMPUTE[kind], **changes)
    replayer = MegatronReplay(chunks)
    batches = tiny.tokens(2, length=64)
    with replayer.record() as recording:
        tiny.train_step(chunks, batches)
    routes, peaks = recording.gather(), {}
    for name in ("live", "replay"):
        chunks[0].zero_grad()
        gc.collect()
        block = replayer.replay(routes, micro_batch_size=2) if name == "replay" else contextlib.nullcontext()
        with block, Storages() as watched:
            tiny.train_step(chunks, batches)
        peaks[name] = watched.peak
    rows, spec = 2 * 64, replayer.spec
    small = 256  # counters
    assert rows * spec.num_experts * 4 > rows * (spec.row_bytes + spec.top_k * 8) + small  # kept logits would be seen
    assert peaks["replay"] <= peaks["live"] + rows * (spec.row_bytes + spec.top_k * 8) + small


def test_two_models_in_one_process_do_not_touch_each_other(hf: Any) -> None:
    batches = tiny.tokens(1)
    policy, reference = tiny.megatron_model(hf), tiny.megatron_model(hf)
    live = tiny.train_step(reference, batches)
    replayer, other = MegatronReplay(policy), MegatronReplay(reference)
    with replayer.replay(random_routes(16, replayer.spec), micro_batch_size=2), other.record() as recording:
        same(tiny.train_step(reference, batches), live)
        tiny.train_step(policy, batches)
    assert len(recording.routes) == 16
    assert other.stats.passes == 0
    assert NativeReplay.global_router_replay_instances == []


def test_detach_restores_the_model(hf: Any) -> None:
    chunks, batches = tiny.megatron_model(hf), tiny.tokens(1)
    live = tiny.train_step(chunks, batches)
    replayer = MegatronReplay(chunks)
    routes = random_routes(16, replayer.spec)
    with replayer.replay(routes, micro_batch_size=2):
        tiny.train_step(chunks, batches)
    with pytest.raises(ReplayError, match="already belongs to a RouterReplay"):
        MegatronReplay(chunks)
    replayer.detach()
    same(tiny.train_step(chunks, batches), live)
    with pytest.raises(ReplayError, match="was detached"), replayer.replay(routes):
        pass
    MegatronReplay(chunks)


def test_the_native_replay_of_megatron_is_left_as_it_was(hf: Any) -> None:
    try:
        chunks, batches = tiny.megatron_model(hf, moe_enable_routing_replay=True), tiny.tokens(1)
        natives = list(NativeReplay.global_router_replay_instances)
        replayer = MegatronReplay(chunks)
        with replayer.replay(random_routes(16, replayer.spec), micro_batch_size=2):
            tiny.train_step(chunks, batches)
        routers = [site.module for one in replayer._passes for site in one.sites]
        assert [router.router_replay for router in routers] == natives
        assert all(native.recorded_topk_idx is None and not native.replay_backward_list for native in natives)
    finally:
        NativeReplay.clear_global_router_replay_instances()


@pytest.mark.parametrize("wrapper", ["float16", "ddp"])
def test_wrapped_models_are_found_and_replayed(hf: Any, wrapper: str) -> None:
    if wrapper == "float16":
        (chunk,) = tiny.megatron_model(hf, bf16=True)
        model: Any = Float16Module(chunk.config, chunk)
    else:
        (chunk,) = tiny.megatron_model(hf)
        model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    replayer = MegatronReplay([model])
    routes = random_routes(16, replayer.spec)
    (batch,) = tiny.tokens(1)
    with replayer.replay(routes, micro_batch_size=2), replayer.record() as recording:
        tiny.forward(model, batch).sum().backward()
    assert recording.routes == routes
    weight = chunk.decoder.layers[1].mlp.router.weight
    assert (weight.main_grad if wrapper == "ddp" else weight.grad).abs().sum() > 0


# -- multi-token prediction, padding ------------------------------------------------------------------------


def test_multi_token_prediction_is_left_alone(hf: Any) -> None:
    chunks, batches = tiny.megatron_model(hf, mtp=True), tiny.tokens(1)
    replayer = MegatronReplay(chunks)
    assert replayer.spec.layers == (1, 2, 3)
    router = chunks[0].mtp.layers[0].transformer_layer.mlp.router
    calls: list[tuple[Tensor, Tensor]] = []
    router.register_forward_hook(lambda module, args, out: calls.append((args[0].detach(), out[1])))
    with replayer.replay(random_routes(16, replayer.spec), micro_batch_size=2):
        tiny.train_step(chunks, batches)
    hidden, used = calls[0]
    assert torch.equal(used, router(hidden)[1])  # its own choice for the same input
    assert router.routing.__func__ is type(router).routing


@pytest.mark.parametrize("kind", ["none", "full", "moe"])
def test_padding_rows_are_valid_sets_and_are_not_counted(hf: Any, kind: str) -> None:
    settings = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.01,
        **tiny.RECOMPUTE[kind],
    }
    chunks, batches = tiny.megatron_model(hf, **settings), tiny.tokens(1)
    chunks[0].train()
    replayer = MegatronReplay(chunks)
    routers = [site.module for one in replayer._passes for site in one.sites]
    forced = random_routes(16, replayer.spec)
    padding = np.zeros(16, bool)
    padding[[6, 7, 13, 14, 15]] = True
    routes = tiny.with_missing(forced, np.flatnonzero(padding).tolist())
    with replayer.replay(routes, micro_batch_size=2, padding=padding), replayer.record() as recording:
        tiny.train_step(chunks, batches)
    used = recording.routes.ids  # Routes checks that every row holds distinct experts, padding too
    for number, router in enumerate(routers):
        expected = np.bincount(used[~padding, number].reshape(-1), minlength=8)
        assert router.local_tokens_per_expert.tolist() == expected.tolist()
        assert router.global_tokens_per_expert.sum() == (~padding).sum() * 2


def test_masks_also_apply_to_recorded_rows_and_shares(hf: Any) -> None:
    settings = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    chunks, batches = tiny.megatron_model(hf, **settings), tiny.tokens(1)
    replayer = MegatronReplay(chunks)
    padding = np.arange(16) % 8 >= 6
    with torch.no_grad(), replayer.record() as recording:
        tiny.train_step(chunks, batches, forward_only=True)
    with replayer.replay(recording, micro_batch_size=2, padding=[padding]):
        tiny.train_step(chunks, batches)
    for number, router in enumerate(site.module for one in replayer._passes for site in one.sites):
        expected = np.bincount(recording.routes.ids[~padding, number].reshape(-1), minlength=8)
        assert router.local_tokens_per_expert.tolist() == expected.tolist()

    share = replayer.layout.share(tiny.with_missing(random_routes(16, replayer.spec), [7, 9]), 2)
    with replayer.replay(share, micro_batch_size=2, padding=padding):
        tiny.train_step(chunks, batches)
    assert replayer.stats.rows_live == (1, 1, 1)  # row 7 is padding
    bears_loss = np.arange(16) == 9
    with (
        pytest.raises(ReplayError, match="micro-batch 0: 1 rows that bear loss are missing"),
        replayer.replay(share, micro_batch_size=2, loss_mask=bears_loss),
    ):
        pass
    with (
        pytest.raises(ReplayError, match=r"micro-batch 0: padding must have one entry per token: expected \[16\]"),
        replayer.replay(share, micro_batch_size=2, padding=np.zeros(15)),
    ):
        pass
