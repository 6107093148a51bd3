"""Every MoE family of transformers, through the same tests.

What reaches the experts is read where the experts are, not from the code under test: see `probe.py`.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from router_replay import RouterSpec, Routes
from router_replay.errors import ReplayError
from router_replay.families import FAMILIES as RECORDS
from router_replay.families import measured, table
from router_replay.families.from_modules import find_routers
from router_replay.families.types import YES
from router_replay.families.versions import is_older
from router_replay.forward.router_precision import compute_routers_in_float32
from router_replay.replay.own_code import with_topk
from router_replay.replay.replayer import RouterReplay
from router_replay.replay.site import Site
from tests.replay import rules, tiny
from tests.replay.probe import Probe

FAMILIES = sorted(tiny.FAMILIES)
RECORD_OF = {record.name: record for record in RECORDS}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def built(family: str) -> tiny.Tiny:
    """One model per family for all tests: each leaves it as it was, and a test holds that."""
    return tiny.make(family)


@pytest.fixture
def model(family: str) -> Any:
    made = built(family)
    made.model.train()
    yield made
    made.model.zero_grad(set_to_none=True)


@pytest.fixture
def replayer(model: tiny.Tiny) -> Any:
    made = RouterReplay(model.model)
    yield made
    made.detach()


def random_routes(spec: RouterSpec, rows: int, seed: int = 0, captured: Any = None) -> Routes:
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(spec.num_experts), (rows, len(spec.layers), 1)), axis=-1)[..., : spec.top_k]
    return Routes(ids, spec, captured)


def loss_of(out: Tensor) -> Tensor:
    """A loss that is not blind to anything: each number of the output has its own weight."""
    return (out.double() * torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)).sum()


def run(model: tiny.Tiny) -> tuple[Tensor, dict[str, Tensor]]:
    model.model.zero_grad(set_to_none=True)
    out = model.forward()
    loss_of(out).backward()
    return out.detach(), gradients(model)


def gradients(model: tiny.Tiny) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    different = [name for name in got[1] if not torch.equal(got[1][name], expected[1][name])]
    assert not different


def switch_checkpointing(model: Any, on: bool) -> None:
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False}) if on else model.gradient_checkpointing_disable()
        return
    for module in model.modules():  # jetmoe has the layers for it, transformers does not offer it
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = on
            module._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)


def test_no_moe_family_of_transformers_is_forgotten() -> None:
    """A family is a modelling file that records router logits, or has a class that is named like a part of a MoE."""
    folder = pathlib.Path(transformers.models.__file__).parent
    parts = re.compile(r"^class \w*(Router|Experts?|MoE|Moe|MOE|MoeMLP|MoeBlock|Gating|Top[kK]Gate)\(", re.MULTILINE)
    there = set()
    for file in folder.glob("*/modeling_*.py"):
        source = file.read_text(encoding="utf-8")
        if '"router_logits":' in source or parts.search(source):
            there.add(file.parent.name)
    assert there - set(tiny.FAMILIES) <= {family.name for family in RECORDS if family.no_router}
    assert {name for name in tiny.FAMILIES if not is_older(measured.FAMILIES[name].since)} <= there
    assert {row.family for row in table.rows()} == {family.name for family in RECORDS} >= there


@every_family
def test_config_and_modules_agree(family: str, model: tiny.Tiny) -> None:
    found = find_routers(model.model).spec
    assert RouterSpec.from_config(model.model.config) == found
    assert RouterSpec.from_config(model.model.config.to_dict()) == found
    assert RouterSpec.from_config(model.model.config).num_layers == found.num_layers


@every_family
def test_a_router_without_a_mode_computes_the_same_bits(
    family: str, model: tiny.Tiny, replayer: RouterReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second call on, a router that chooses in its own code needs no TorchFunctionMode."""
    routes = random_routes(replayer.spec, model.tokens)
    used: list[str] = []

    def counted(function: Any, topk: Any) -> Any:
        used.append(function.__qualname__)
        return with_topk(function, topk)

    def replayed() -> tuple[Tensor, dict[str, Tensor]]:
        with replayer.replay(routes):
            return run(model)

    monkeypatch.setattr("router_replay.replay.site.with_topk", counted)
    with monkeypatch.context() as patched:
        patched.setattr(Site, "_learn_chooser", lambda *_: None)
        expected = replayed()
        assert_same(replayed(), expected)
        assert not used
    replayed()
    assert_same(replayed(), expected)
    plain = family in ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")
    assert len(used) in ((len(replayer.routers),) if plain else (0, len(replayer.routers)))


@every_family
def test_a_recording_inside_a_replay_holds_the_live_choice_of_missing_rows(
    family: str, model: tiny.Tiny, replayer: RouterReplay
) -> None:
    """With agreement it is read from what is kept for the comparison, without it from each router's call."""
    routes = random_routes(replayer.spec, model.tokens, captured=np.arange(model.tokens) % 3 != 1)
    found = []
    for agreement in (False, True):
        replaying = replayer.replay(routes, on_missing="live", agreement=agreement)
        with torch.no_grad(), replayer.record() as recorded, replaying:
            model.forward()
        found.append(recorded.routes)
    assert found[1] == found[0]
    assert found[1][:1] == routes[:1]


@every_family
def test_record_and_replay_of_the_own_choice_change_no_bit(family: str, model: tiny.Tiny) -> None:
    baseline = run(model)
    replayer = RouterReplay(model.model)
    assert_same(run(model), baseline)  # attached, nothing in force
    with replayer.record() as recording:
        recorded = run(model)
    with replayer.replay(recording.routes):
        replayed = run(model)
    with replayer.replay(recording, agreement=True):
        compared = run(model)
    after = run(model)
    replayer.detach()
    for got in (recorded, replayed, compared, after, run(model)):
        assert_same(got, baseline)
    assert replayer.stats.agreement == (1.0,) * len(replayer.spec.layers)
    assert replayer.stats.rows_replayed == (2 * model.tokens,) * len(replayer.spec.layers)
    assert replayer.stats.rows_live == (0,) * len(replayer.spec.layers)


@every_family
def test_forced_routes_reach_the_experts(family: str, model: tiny.Tiny, replayer: RouterReplay) -> None:
    live = model.forward()
    routes = random_routes(replayer.spec, model.tokens)
    with Probe(family, model.model) as probe, replayer.replay(routes, agreement=True), replayer.record() as recording:
        forced = model.forward()
    probe.assert_used(routes.ids)
    probe.assert_weights_count()
    assert probe.order == list(range(len(replayer.spec.layers)))  # columns stand in call order
    assert recording.routes == routes  # slot order included
    assert not torch.equal(live, forced)
    alone = probe.live_choice()
    if alone is not None:
        same = (np.sort(alone, -1) == np.sort(routes.ids, -1)).all(-1).mean(0)
        assert replayer.stats.agreement == pytest.approx(tuple(same))


def test_every_family_has_a_rule_or_is_known_to_have_none() -> None:
    assert set(rules.RULES) | rules.NO_RULE == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(rules.RULES))
def test_forced_weights_follow_the_family_s_rule(family: str, model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.eval()
    routes = random_routes(replayer.spec, model.tokens)
    routers = find_routers(model.model).routers
    with Probe(family, model.model) as probe, rules.Logits(routers) as seen, replayer.replay(routes):
        model.forward()
    for column, router in enumerate(routers):
        ids_TK = torch.from_numpy(routes.ids[:, column].astype(np.int64))
        expected = rules.RULES[family].weights(seen.logits[column].float(), ids_TK)
        if family == "zaya":
            expected = expected.masked_fill(ids_TK == router.num_experts - 1, 0.0)  # its skip class
        assert torch.allclose(rules.weights_seen(probe.weights[column], ids_TK).float(), expected, atol=1e-6)


@every_family
def test_missing_rows_stay_live(family: str, model: tiny.Tiny, replayer: RouterReplay) -> None:
    with replayer.record() as recording:
        model.forward()
    own = recording.routes.ids
    captured = np.arange(model.tokens) % 3 != 1
    routes = random_routes(replayer.spec, model.tokens, captured=captured)
    with Probe(family, model.model) as probe, replayer.replay(routes), replayer.record() as mixed:
        model.forward()
    expected = np.where(captured[:, None, None], routes.ids, mixed.routes.ids)
    expected[~captured, 0] = own[~captured, 0]  # nothing was forced before the first routed layer
    probe.assert_used(expected)
    assert replayer.stats.rows_replayed[0] == captured.sum()
    assert replayer.stats.rows_live[0] == (~captured).sum()
    probe.assert_live_rows(~captured)


@every_family
def test_checkpointing_recomputes_with_the_routes_of_its_forward(
    family: str, model: tiny.Tiny, replayer: RouterReplay
) -> None:
    routes, others = (random_routes(replayer.spec, model.tokens, seed) for seed in (1, 2))
    with replayer.replay(routes):
        expected = run(model)
    switch_checkpointing(model.model, True)
    try:
        model.model.zero_grad(set_to_none=True)
        with replayer.replay(routes):
            out = model.forward()
        with replayer.replay(others), Probe(family, model.model) as recompute:  # closed, and another one open
            loss_of(out).backward()
        assert_same((out.detach(), gradients(model)), expected)
        assert recompute.calls  # or nothing was recomputed, and this test shows nothing
    finally:
        switch_checkpointing(model.model, False)


@every_family
def test_router_gradients_match_finite_differences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In double precision, out of training mode: phimoe's gradient in training is an estimate by design."""
    if family == "flint":  # its router asks for float32, too coarse for the small slope of its tiny model
        narrow = torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype is torch.float64 else narrow(x))
    model = tiny.make(family, dtype=torch.float64)
    model.model.eval()
    replayer = RouterReplay(model.model)
    routes = random_routes(replayer.spec, model.tokens)
    weights = Probe.router_weights(model.model)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in weights]

    def loss_at(step: float) -> Tensor:
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight.add_(direction, alpha=step)
        with replayer.replay(routes):
            return loss_of(model.forward())

    grads = torch.autograd.grad(loss_at(0.0), weights)
    start = [weight.detach().clone() for weight in weights]
    slope = sum((grad * direction).sum().item() for grad, direction in zip(grads, directions, strict=True))
    assert abs(slope) > 1e-4
    # Routers that compute in float32 whatever the model's dtype need a wide step, the others bear a narrow one.
    errors = []
    for step in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6):
        difference = 0.0
        for sign in (1, -1):
            difference += sign * loss_at(sign * step).item()
            with torch.no_grad():
                for weight, value in zip(weights, start, strict=True):
                    weight.copy_(value)
        errors.append(abs(difference / (2 * step) - slope) / abs(slope))
    assert min(errors) < 5e-3, errors
    for grad in grads:
        assert grad.abs().max() > 0


@every_family
def test_a_router_in_float32_replays_to_the_bit_in_a_bfloat16_model(family: str) -> None:
    model = tiny.make(family, dtype=torch.bfloat16)
    if RECORD_OF[family].float32_router != YES:
        with pytest.raises(ReplayError, match=f"float32 routers in {type(model.model).__name__}: no: "):
            compute_routers_in_float32(model.model)
        return
    weights = Probe.router_weights(model.model)
    plain = model.forward().dtype
    compute_routers_in_float32(model.model)
    replayer = RouterReplay(model.model)
    seen: list[torch.dtype] = []
    for router in find_routers(model.model).routers:
        router.module.register_forward_hook(lambda module, args, out: seen.extend(_floats(out)))
    with replayer.record() as recording:
        recorded = run(model)
    with replayer.replay(recording.routes):
        assert_same(run(model), recorded)
    assert recorded[0].dtype is plain  # the rest of the model computes as before
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert set(seen) == {torch.float32}


def _floats(values: Any) -> list[torch.dtype]:
    values = values if isinstance(values, tuple) else (values,)
    return [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    docs = pathlib.Path(__file__).parents[2] / "docs" / "families.md"
    assert table.families_table() in docs.read_text(encoding="utf-8")
