"""What remains after replay is split into gate weights and the rest of the arithmetic, and the split can be trusted."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

from router_replay.batch import Sample
from router_replay.cli import main
from router_replay.measure import logprob_gap
from router_replay.replay.replayer import RouterReplay
from router_replay.rl.policy.models import model_folder
from router_replay.verify.gates import RouterOutputs
from router_replay.verify.passes import Trainer
from router_replay.verify.rollouts import generate, open_engine, read_prompts
from router_replay.verify.run import verify
from router_replay.verify.split import MOST_TOKENS, Split, Splitting, fitting, split_of
from tests.replay import tiny
from tests.replay.test_families import every_family, random_routes
from tests.replay.test_families import model as model  # the fixtures
from tests.replay.test_families import replayer as replayer
from tests.verify.test_verify import make_model, rollouts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@every_family
def test_given_gate_weights_reach_the_experts_in_every_family(model: tiny.Tiny, replayer: RouterReplay) -> None:
    model.model.eval()
    if why_not := RouterOutputs.why_not(replayer.routers):
        assert model.model.config.model_type == "doge"
        assert "one module" in why_not
        return
    outputs, routes = RouterOutputs(replayer.routers), random_routes(replayer.spec, tiny.BATCH * tiny.LENGTH)
    with torch.no_grad(), replayer.replay(routes):
        with outputs.kept():
            expected = model.forward()
        with outputs.given():
            assert torch.equal(model.forward(), expected)
        outputs._outputs = tree_map_only(torch.Tensor, shaken, outputs._outputs)
        with outputs.given():
            assert not torch.equal(model.forward(), expected)
        assert torch.equal(model.forward(), expected)  # nothing is left behind


def shaken(values: torch.Tensor) -> torch.Tensor:
    return values * (1 + 0.2 * torch.rand_like(values)) if values.is_floating_point() else values


def splitting(folder: str, samples: list[Sample]) -> Split:
    trainer = Trainer(pathlib.Path(folder), "cpu")
    made = Splitting(trainer, samples, [sample.routes.read() for sample in samples if sample.routes is not None])
    assert len(made) == len(samples)
    made.in_float32(lambda: None)
    trainer.to_bfloat16()
    return made.in_bfloat16(lambda: None)


def test_gate_weights_that_are_always_one_have_no_part(tmp_path: pathlib.Path) -> None:
    """One expert per token, and weights that are normalised: the rest of the arithmetic is all there is."""
    folder = str(make_model(tmp_path / "one", top_k=1))
    found = splitting(folder, rollouts(folder))
    assert found.number_types > 0
    assert (found.gates, found.rest) == (0, 1)


def test_a_difference_in_the_routers_alone_is_all_gate_weights(tmp_path: pathlib.Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    samples = rollouts(folder)
    routes = [sample.routes.read() for sample in samples if sample.routes is not None]
    trainer = Trainer(pathlib.Path(folder), "cpu")
    gates = trainer.gates()
    before = trainer.replayed(samples, routes, lambda: None, keep=gates)[0]
    for name in trainer._replayer.router_names:  # in place of another number type: coarser weights of the routers only
        for weight in trainer._model.get_submodule(name).parameters():
            weight.data.copy_(weight.data.bfloat16())
    own, given = (trainer.replayed(samples, routes, lambda: None, give=give)[0] for give in (None, gates))
    assert not all(np.array_equal(a, b) for a, b in zip(own, before, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(given, before, strict=True))


def test_the_estimate_is_near_what_the_engines_own_gate_weights_show() -> None:
    """An engine whose gate weights are known: the same model in bfloat16 with another attention kernel."""
    folder = model_folder("tiny")
    prompts = [prompt for seed in range(3) for prompt in read_prompts(None, folder, seed)[0]]
    with open_engine("embedded", folder, "bfloat16", 64) as engine:
        samples = generate(engine, prompts, 24)
    routes = [sample.routes.read() for sample in samples if sample.routes is not None]

    def k3(one: list[np.ndarray], other: list[np.ndarray]) -> float:
        pairs = [(a[s.loss_mask[1:]], b[s.loss_mask[1:]]) for a, b, s in zip(one, other, samples, strict=True)]
        return logprob_gap(*(np.concatenate(side) for side in zip(*pairs, strict=True))).k3

    engine_model = Trainer(folder, "cpu")
    engine_model._model.set_attn_implementation("eager")
    engine_model.to_bfloat16()
    gates = engine_model.gates()
    theirs = engine_model.replayed(samples, routes, lambda: None, keep=gates)[0]
    trainer = Trainer(folder, "cpu")
    own = trainer.gates()
    own._outputs = gates._outputs
    without = trainer.replayed(samples, routes, lambda: None)[0]
    with_theirs = trainer.replayed(samples, routes, lambda: None, give=own)[0]
    known = 1 - k3(with_theirs, theirs) / k3(without, theirs)
    found = splitting(str(folder), samples)
    assert found.gates is not None
    assert 0.2 < known < 0.7
    assert found.gates == pytest.approx(known, abs=0.2)


def test_the_verdict_has_the_split_and_says_how_it_was_made() -> None:
    folder = model_folder("tiny")
    with open_engine("embedded", folder, "bfloat16", 64) as engine:
        samples = generate(engine, read_prompts(None, folder, 0)[0], 24)
    found = verify(samples, str(folder), "test", device="cpu")
    facts: dict[str, Any] = json.loads(json.dumps(found.as_json()))["split"]
    assert facts["gates"] + facts["rest"] == pytest.approx(1)
    assert 0 < facts["error"] < 0.5
    assert facts["equal_gates"] < facts["number_types"]
    assert "an estimate from the trainer's own passes" in facts["how"]
    printed = "\n".join(found.as_text())
    assert "what remains of k3      gate weights " in printed
    assert "an engine does not return the gate weights that it used" in printed


def test_an_engine_in_float32_leaves_nothing_to_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tiny", "--device", "cpu", "--engine-dtype", "float32"]) == 0
    assert "not split: what remains is far less" in capsys.readouterr().out


def test_a_fault_is_not_split(tmp_path: pathlib.Path) -> None:
    folder = str(make_model(tmp_path / "model"))
    found = verify(rollouts(folder), folder, "test", fault="shift", device="cpu")
    assert found.finding is not None
    assert found.split is None


def test_what_is_not_of_rounding_has_no_shares() -> None:
    split = split_of(np.full(8, 10.0), np.full(8, 4.0), tokens=1000)
    assert (split.gates, split.rest, split.error) == (pytest.approx(0.6), pytest.approx(0.4), pytest.approx(0))
    assert (split.number_types, split.equal_gates) == (0.08, 0.032)
    assert fitting(split, 0.05) == split
    for remains, size in ((1e-4, "less"), (10.0, "more")):
        fitted = fitting(split, remains)
        assert fitted.gates is fitted.rest is None
        assert f"far {size} than" in fitted.why_not
    assert split_of(np.zeros(3), np.zeros(3), 10).why_not == "float32 and bfloat16 give the same log-probs"
    assert split_of(np.ones(3), np.ones(3) / 2, 10).error is None  # three sequences are too few
    assert split_of(np.ones(3), np.ones(3) * 2, 10).gates == 0


def test_gate_weights_are_kept_of_few_tokens_only(tmp_path: pathlib.Path) -> None:
    folder = make_model(tmp_path / "model")
    trainer = Trainer(folder, "cpu")
    made = [sequence(MOST_TOKENS // 3)] * 5
    assert len(Splitting(trainer, made, [])) == 3
    long = [sequence(MOST_TOKENS + 1)] * 2
    assert len(Splitting(trainer, long, [])) == 1
    assert Splitting(trainer, long, []).why_not == "no token was sampled"


def sequence(length: int) -> Sample:
    return Sample(np.zeros(length, np.int64), np.zeros(length), np.zeros(length, bool), None)
