"""MegatronPolicy computes what Policy computes, in one process and in every division over several ranks."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch

from router_replay.engines.vllm.weights import checkpoint_tensors
from router_replay.errors import BatchError, ConfigError
from router_replay.rl.policy import delivery
from router_replay.rl.policy.megatron.policy import MegatronPolicy
from router_replay.rl.policy.policy import Policy
from router_replay.rl.processes.ranks import Ranks
from tests.megatron_real import policies, tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE = Ranks(0, 1, 1, torch.device("cpu"))
modes = pytest.mark.parametrize("mode", policies.MODES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("policies")
    tiny.hf_model(pad_token_id=policies.PADDING).save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module")
def alone(folder: pathlib.Path) -> dict[str, policies.Found]:
    """What one process with Megatron computes, by mode."""
    tiny.start()
    return {mode: policies.run(folder / "model", 0, 1, policies.Division(), mode) for mode in policies.MODES}


@pytest.fixture(scope="module")
def found(folder: pathlib.Path) -> dict[int, list[dict[Any, policies.Found]]]:
    """What each process saved, by the number of processes."""
    return {world: run_ranks(folder, world) for world in (2, 4)}


def run_ranks(folder: pathlib.Path, world: int) -> list[dict[Any, policies.Found]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron_real.policies", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(world)], cwd=ROOT, env=environment) for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=500) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()
    saved = [torch.load(folder / f"policy{rank}of{world}.pt", weights_only=False) for rank in range(world)]
    return [{key: policies.Found(**one) for key, one in rank.items()} for rank in saved]


def same(got: policies.Found, expected: policies.Found) -> None:
    """Assert that two policies computed the same, up to the rounding of float32.

    AdamW divides each gradient by its size, so it makes a visible step of a gradient that is only rounding. The moments
    of the optimizer have no such step, and are compared tightly.
    """
    for mine, theirs in zip(got.figures, expected.figures, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-5, abs=2e-5), name
    assert list(got.weights) == list(expected.weights)
    for name, weight in expected.weights.items():
        assert (got.weights[name] - weight).abs().max() < 0.1 * policies.LR, name
        for moment in ("exp_avg", "exp_avg_sq"):
            mine, theirs = (one.optimizer[name][moment] for one in (got, expected))
            assert (mine - theirs).abs().max() <= 5e-5 * max(float(theirs.abs().max()), 1e-3), (name, moment)
        assert got.optimizer[name]["step"] == expected.optimizer[name]["step"] == 3
    assert got.counts.rows_live == expected.counts.rows_live
    assert got.routers.rows == expected.routers.rows
    assert got.routers.confidence == pytest.approx(expected.routers.confidence, rel=1e-3)
    assert got.routers.entropy == pytest.approx(expected.routers.entropy, rel=1e-3)
    assert np.abs(got.routers.load - expected.routers.load).sum() <= 0.05 * expected.routers.load.sum()


def same_logprobs(got: dict[int, np.ndarray], expected: dict[int, np.ndarray], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for number, values in expected.items():
        assert np.abs(got[number] - values).max() < tolerance


@modes
def test_one_process_computes_what_transformers_computes(
    folder: pathlib.Path, alone: dict[str, policies.Found], mode: str
) -> None:
    policy = Policy(policies.config_of(folder / "model", f"replay={mode}"), ONE, folder / "model")
    expected = policies.train(policy, ONE)
    same(alone[mode], expected)
    assert alone[mode].counts.rows_replayed == expected.counts.rows_replayed
    same_logprobs(alone[mode].logprobs[0], expected.logprobs[0], 1e-5)  # before any update
    same_logprobs(alone[mode].logprobs[1], expected.logprobs[1], 1e-3)
    assert alone[mode].counts.agreement == pytest.approx(expected.counts.agreement, abs=0.05)
    assert expected.figures[2]["ppo_kl"] != 0  # the third update is off-policy
    moments = alone[mode].optimizer["model.embed_tokens.weight"]["exp_avg"]
    assert not moments[policies.PADDING].any()


@pytest.mark.parametrize("settings", [("loss.old=rollout",), ("loss.age_weight=0.5", "loss.max_age=2")])
def test_the_loss_has_the_settings_of_asynchronous_runs(folder: pathlib.Path, settings: tuple[str, ...]) -> None:
    """The engine's log-probs as the old ones, without a scoring pass, and weights by the age of a token."""
    tiny.start()
    config = policies.config_of(folder / "model", "replay=r3", *settings)
    plain = policies.config_of(folder / "model", "replay=r3")
    figures = []
    for make, given in ((MegatronPolicy, config), (Policy, config), (MegatronPolicy, plain)):
        policy = make(given, ONE, folder / "model")
        every = [dataclasses.replace(one, versions=np.arange(len(one)) % 4) for one in policies.samples(policy.spec)]
        multiple = 1 if make is MegatronPolicy else None
        [mini] = delivery.plan([every], ONE, 24, "raise", row_multiple=multiple, version=3)[0]
        figures.append(policy.update(mini, policy.score(mini)))
    megatron, transformers, without = figures
    assert megatron == pytest.approx(transformers, rel=2e-5, abs=2e-5)
    assert megatron["loss"] != pytest.approx(without["loss"], rel=1e-3)


@modes
@pytest.mark.parametrize("name", list(policies.DIVISIONS))
def test_every_division_computes_what_one_process_computes(
    found: Any, alone: dict[str, policies.Found], name: str, mode: str
) -> None:
    ranks = [one[name, mode] for one in found[policies.DIVISIONS[name].world]]
    same(ranks[0], alone[mode])
    if mode == "r3" or policies.DIVISIONS[name].tensor == 1:  # R2 records the padding to a multiple of the ranks too
        assert ranks[0].counts.rows_replayed == alone[mode].counts.rows_replayed
    for one in ranks:
        assert one.figures == ranks[0].figures
        assert one.counts == ranks[0].counts
        assert one is ranks[0] or not one.weights
    for number in range(3):
        merged: dict[int, np.ndarray] = {}
        for one in ranks:
            for sample, values in one.logprobs[number].items():
                assert sample not in merged or np.array_equal(merged[sample], values)  # all ranks of a replica
                merged[sample] = values
        same_logprobs(merged, alone[mode].logprobs[number], 1e-5 if number == 0 else 1e-3)


def test_weights_come_out_as_they_went_in_to_the_bit(
    folder: pathlib.Path, found: Any, alone: dict[str, policies.Found]
) -> None:
    expected = tiny.hf_model(pad_token_id=policies.PADDING).state_dict()
    out = [alone["r3"].before, *(one.before for world in (2, 4) for one in found[world][0].values())]
    assert len(out) == 1 + len(policies.DIVISIONS) * len(policies.MODES)
    for weights in out:
        assert list(weights) == list(expected)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_the_state_of_one_policy_goes_on_in_the_other(folder: pathlib.Path, alone: dict[str, policies.Found]) -> None:
    """Both write the optimizer's state by Hugging Face names: a run can change its backend and its division."""
    config = policies.config_of(folder / "model", "replay=r3")
    tiny.start()
    made = [policy(config, ONE, folder / "model") for policy in (MegatronPolicy, Policy)]
    state = alone["r3"].optimizer
    written = [checkpoint_tensors(policy.model, policies.weights_of(policy)) for policy in made]
    assert written[0].keys() == written[1].keys()  # as vLLM gets them: the model without weights names them too
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())
    assert made[0].router_names == made[1].router_names
    for policy in made:
        policy.load_optimizer_state(state)
        policy.updates = 3
        kept = policies.optimizer_of(policy)
        assert set(kept) == set(state)
        for name, held in state.items():
            assert all(torch.equal(kept[name][key], value) for key, value in held.items())
    mini, figures = delivery.plan([policies.samples(made[0].spec)], ONE, 24, "raise", row_multiple=1)[0][0], []
    for policy in made:
        figures.append(policy.update(mini, policy.score(mini)))
    assert figures[0] == pytest.approx(figures[1], rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("routers", ["model", "float32"])
def test_bfloat16_rounds_no_more_than_with_transformers(folder: pathlib.Path, routers: str) -> None:
    rounded = ["replay=r3", "model.dtype=bfloat16", f"model.router_dtype={routers}"]
    tiny.start()
    found = {}
    for name, kind, settings in (
        ("megatron", MegatronPolicy, rounded),
        ("transformers", Policy, rounded),
        ("float32", Policy, ["replay=r3"]),
    ):
        policy = kind(policies.config_of(folder / "model", *settings), ONE, folder / "model")
        [[mini]] = delivery.plan([policies.samples(policy.spec)], ONE, 24, "raise", row_multiple=1)
        scored = policy.score(mini)
        policy.update(mini, scored)
        again = policy.score(mini)  # the copies of the weights follow the update
        found[name] = torch.stack([one.old_logprobs for passes in (scored, again) for one in passes])
        assert {weight.dtype for weight in policies.weights_of(policy).values()} == {torch.float32}
    errors = {name: (found[name] - found["float32"]).abs().mean() for name in ("megatron", "transformers")}
    assert 0 < errors["megatron"] < 2 * errors["transformers"]


@pytest.mark.parametrize("replayed", ["false", "true"])
def test_a_reference_model_gives_the_same_kl(folder: pathlib.Path, tmp_path: pathlib.Path, replayed: str) -> None:
    other = tiny.hf_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02)
    other.save_pretrained(tmp_path)
    own = ["replay=r3", "reference.kl=0.3", f"reference.path={tmp_path}", f"reference.replay={replayed}"]
    config = policies.config_of(folder / "model", *own)
    tiny.start()
    figures = []
    for kind in (MegatronPolicy, Policy):
        policy = kind(config, ONE, folder / "model")
        [[mini]] = delivery.plan([policies.samples(policy.spec)], ONE, 24, "raise", row_multiple=1)
        figures.append(policy.update(mini, policy.score(mini)))
    assert figures[0] == pytest.approx(figures[1], rel=5e-5, abs=2e-5)
    assert figures[0]["reference_kl"] > 0.01


def test_packed_bins_are_refused(folder: pathlib.Path) -> None:
    tiny.start()
    policy = MegatronPolicy(policies.config_of(folder / "model"), ONE, folder / "model")
    [[mini]] = delivery.plan([policies.samples(policy.spec)], ONE, 24, "raise")
    with pytest.raises(BatchError, match="blocks of rows of one length"):
        policy.score(mini)


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({"tie_word_embeddings": True}, [], "tied"),
        ({"attention_bias": True}, [], "biases"),
        ({"hidden_act": "gelu"}, [], "activation"),
        ({}, ["megatron.tensor_parallel=4"], "num_key_value_heads = 2 is not a multiple of megatron.tensor_parallel"),
        ({}, ["megatron.pipeline_parallel=3"], "num_hidden_layers = 4 is not a multiple"),
        ({}, ["megatron.expert_parallel=3"], "num_experts = 8 is not a multiple of megatron.expert_parallel = 3"),
    ],
)
def test_models_that_megatron_cannot_express_are_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], settings: list[str], reason: str
) -> None:
    from router_replay.rl.policy.megatron.model import load_model

    tiny.hf_model(**changes).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, policies.config_of(tmp_path, *settings), ONE)


def test_other_families_are_refused(tmp_path: pathlib.Path) -> None:
    from router_replay.rl.policy.megatron.model import load_model

    tiny.glm_model().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match='its model_type is "glm4_moe", and only "qwen3_moe"'):
        load_model(tmp_path, policies.config_of(tmp_path), ONE)
