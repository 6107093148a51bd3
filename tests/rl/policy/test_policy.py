"""Which experts each pass uses in each mode, and that an update learns from exactly its mini-batch."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from router_replay import Routes, Sample
from router_replay.batch.tensors import TensorRoutes
from router_replay.errors import ReplayError, TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.policy import delivery
from router_replay.rl.policy.base import Scored
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks, join, leave

ONE = Ranks(0, 1, 1, torch.device("cpu"))


@pytest.fixture
def make(make_config: Callable[..., TrainConfig], random_model: pathlib.Path) -> Callable[..., Policy]:
    return lambda *settings: Policy(make_config(*settings), ONE, random_model)


def samples(policy: Policy, routed: bool = True, missing: int | None = None) -> list[Sample]:
    """Sequences with random rows: a replay that does nothing shows."""
    made = []
    spec = policy.replayer.spec
    for number, length in enumerate((9, 6, 7)):
        rng = np.random.default_rng(number)
        ids = np.argsort(rng.random((length, len(spec.layers), spec.num_experts)), axis=-1)[..., : spec.top_k]
        captured = np.arange(length) < length - 1
        if missing is not None:
            captured[missing] = False
        routes = Routes(ids, spec, captured=captured) if routed else None
        mask = np.arange(length) > 2
        made.append(Sample(rng.integers(2, 20, length), -rng.random(length), mask, routes, advantages=1.0 - number))
    return made


def mini_batch(policy: Policy, on_missing: Any = "raise", **arguments: Any) -> MiniBatch:
    [[mini]] = delivery.plan([samples(policy, **arguments)], ONE, 64, on_missing)
    return mini


def routes_of(scored: list[Scored]) -> Routes:
    routes = scored[0].routes
    assert isinstance(routes, TensorRoutes)
    return Routes(routes.ids.numpy(), routes.spec)


def test_r3_replays_the_engines_rows_in_both_passes(make: Callable[..., Policy]) -> None:
    policy = make("replay=r3")
    mini = mini_batch(policy)
    used = []
    with policy.replayer.record() as recording:
        scored = policy.score(mini)
        used.append(recording.routes)
    with policy.replayer.record() as recording:
        policy.update(mini, scored)
        used.append(recording.routes)
    asked = mini.micro[0].routes
    assert asked is not None
    for routes in used:
        assert np.array_equal(routes.ids[asked.captured], asked.ids[asked.captured])
    counts = policy.route_counts()
    assert (set(counts.rows_replayed), set(counts.rows_live)) == (
        {2 * 19},
        {0},
    )  # the last token of each sequence predicts nothing
    assert counts.agreement is not None
    assert np.mean(counts.agreement) < 0.2  # random rows
    assert set(policy.route_counts().rows_replayed) == {0}  # counted since the last call


def test_r2_replays_the_scoring_pass_also_after_the_weights_changed(make: Callable[..., Policy]) -> None:
    policy = make("replay=r2", "optimizer.lr=0.05")
    mini = mini_batch(policy, on_missing="live", routed=False)
    scored = policy.score(mini)
    first = routes_of(scored)
    policy.update(mini, scored)
    with policy.replayer.record() as recording:
        policy.update(mini, scored)
        replayed = recording.routes
    live = routes_of(policy.score(mini))
    assert replayed.same_sets(first)
    assert not live.same_sets(first)  # so the equality above was replay's doing


def test_the_update_of_r3_uses_the_scoring_passs_experts_in_missing_rows(make: Callable[..., Policy]) -> None:
    """Otherwise the ratio of new to old log-probs would hold a change of experts."""
    policy = make("replay=r3", "rollout.on_missing=live", "optimizer.lr=1.0")
    mini = mini_batch(policy, "live", missing=3)
    with policy.replayer.record() as scoring:
        scored = policy.score(mini)
    for _ in range(2):  # the second update starts from other weights
        with policy.replayer.record() as updating:
            policy.update(mini, scored)
        assert np.array_equal(updating.routes.ids, scoring.routes.ids)
    counts = policy.route_counts()
    assert set(counts.rows_live) == {3 * 3}  # a missing row is counted as live in all three passes
    assert counts.agreement is not None
    assert max(counts.agreement) < 0.5  # of the captured rows only, which are random
    with policy.replayer.record() as live:
        policy.model(input_ids=mini.micro[0].to_torch("cpu").token_ids[None])
    missing = ~mini.micro[0].routes.captured  # type: ignore[union-attr]
    assert not np.array_equal(live.routes.ids[missing], scoring.routes.ids[missing])  # the weights did change


def test_the_age_of_each_token_reaches_the_loss(make: Callable[..., Policy]) -> None:
    policy = make("replay=r3", "loss.age_weight=0")  # only tokens of the version that is updated count
    aged = [dataclasses.replace(one, versions=np.full(len(one), 4)) for one in samples(policy)]
    norms = []
    for version in (5, 4):
        [[mini]] = delivery.plan([aged], ONE, 64, "raise", version=version)
        norms.append(policy.update(mini, policy.score(mini))["grad_norm"])
    assert norms[0] == 0 < norms[1]


def test_off_routes_live_and_counts_agreement_with_the_engine(make: Callable[..., Policy]) -> None:
    policy = make("replay=off")
    mini = mini_batch(policy)
    policy.update(mini, policy.score(mini))
    counts = policy.route_counts()
    assert (set(counts.rows_replayed), set(counts.rows_live)) == ({0}, {2 * 19})
    assert counts.rows_compared == 19
    assert counts.agreement is not None


def test_the_old_log_probs_equal_the_first_update_pass(make: Callable[..., Policy]) -> None:
    """Ratio 1 at the first update, in every mode: score and update are the same computation."""
    for mode in ("off", "r2", "r3"):
        policy = make(f"replay={mode}")
        mini = mini_batch(policy)
        figures = policy.update(mini, policy.score(mini))
        assert abs(figures["ppo_kl"]) < 1e-6, mode
        assert figures["grad_norm"] > 0, mode


def test_micro_batches_accumulate_to_the_same_step(make: Callable[..., Policy]) -> None:
    steps = []
    for max_tokens in (64, 9):
        policy = make("replay=r3")
        [[mini]] = delivery.plan([samples(policy)], ONE, max_tokens, "raise")
        policy.update(mini, policy.score(mini))
        # Gradients, not weights: Adam divides a gradient of rounding noise by its own size.
        steps.append((len(mini.micro), {name: p.grad.clone() for name, p in policy.model.named_parameters()}))
    (one, a), (three, b) = steps
    assert (one, three) == (1, 3)
    assert max(float(gradient.abs().max()) for gradient in a.values()) > 1e-2
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-6


def test_checkpointing_gives_the_same_gradients(make: Callable[..., Policy]) -> None:
    norms = []
    for how in ("off", "non_reentrant"):
        policy = make("replay=r3", f"model.gradient_checkpointing={how}")
        mini = mini_batch(policy)
        norms.append(policy.update(mini, policy.score(mini))["grad_norm"])
    assert math.isclose(*norms, rel_tol=1e-6)


@pytest.fixture
def process_group(make_config: Callable[..., TrainConfig]) -> Iterator[None]:
    join(make_config("model.dtype=bfloat16"))
    yield
    leave()


@pytest.mark.usefixtures("process_group")
def test_bfloat16_keeps_float32_master_weights(make: Callable[..., Policy]) -> None:
    policy = make("replay=r3", "model.dtype=bfloat16")
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    mini = mini_batch(policy)
    exact = make("replay=r3").score(mini)[0].old_logprobs
    rounded = policy.score(mini)[0].old_logprobs
    gap = float((exact - rounded).abs().max())
    assert 0 < gap < 0.1  # computed in bfloat16
    policy.update(mini, policy.score(mini))
    assert not torch.equal(policy.score(mini)[0].old_logprobs, rounded)  # the next pass computes with the new weights


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("checkpointing", ["off", "non_reentrant"])
def test_float32_routers_in_a_bfloat16_policy(make: Callable[..., Policy], checkpointing: str) -> None:
    dtypes: dict[str, set[torch.dtype]] = {}
    for router_dtype in ("model", "float32"):
        policy = make(
            "replay=r2",
            "model.dtype=bfloat16",
            f"model.router_dtype={router_dtype}",
            f"model.gradient_checkpointing={checkpointing}",
        )
        seen = dtypes.setdefault(router_dtype, set())
        for name, module in policy.model.named_modules():
            if name in policy.replayer.router_names:
                module.register_forward_hook(
                    lambda module, args, out, seen=seen: seen.update({args[0].dtype, out[0].dtype, module.weight.dtype})
                )
        mini = mini_batch(policy, on_missing="live", routed=False)
        scored = policy.score(mini)
        with policy.replayer.record() as recording:
            figures = policy.update(mini, scored)
        assert figures["grad_norm"] > 0
        assert recording.routes.same_sets(routes_of(scored))  # what was recorded is replayed
        assert abs(figures["ppo_kl"]) < 1e-6  # to the bit: the same weights and the same experts
    assert dtypes == {"model": {torch.bfloat16}, "float32": {torch.float32}}


def test_warm_up(make: Callable[..., Policy]) -> None:
    policy = make("replay=off", "optimizer.lr=1e-3", "optimizer.warmup_steps=4")
    mini = mini_batch(policy)
    scored = policy.score(mini)
    rates = [policy.update(mini, scored)["lr"] for _ in range(5)]
    assert np.allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_missing_row_that_bears_loss_raises_unless_asked_for(make: Callable[..., Policy]) -> None:
    policy = make("replay=r3")
    with pytest.raises(ReplayError, match="bear loss are missing"):
        policy.score(mini_batch(policy, on_missing="live", missing=3))
    allowed = make("replay=r3", "rollout.on_missing=live")
    allowed.score(mini_batch(allowed, on_missing="live", missing=3))
    assert set(allowed.route_counts().rows_live) == {3}


def test_a_loss_that_is_not_finite_touches_no_weight(make: Callable[..., Policy]) -> None:
    policy = make("replay=off")
    mini = mini_batch(policy)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    mini.micro[0].whole.label_advantages[:] = np.nan
    with pytest.raises(TrainError, match=r"loss is nan at optimizer step 0; this step did not change the weights"):
        policy.update(mini, policy.score(mini))
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())


@pytest.mark.parametrize("replays", [False, True])
def test_the_reference_replays_only_when_asked(make: Callable[..., Policy], replays: bool) -> None:
    """The reference is the same model here: with the same experts its log-probs are the policy's, and KL is 0."""
    policy = make("replay=r3", "reference.kl=0.1", f"reference.replay={str(replays).lower()}")
    mini = mini_batch(policy)
    [scored] = policy.score(mini)
    assert scored.reference_logprobs is not None
    gap = float((scored.reference_logprobs - scored.old_logprobs).abs().max())
    assert (gap == 0) == replays
    kl = policy.update(mini, [scored])["reference_kl"]
    assert (kl < 1e-10) == replays
