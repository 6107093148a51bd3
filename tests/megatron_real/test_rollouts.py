"""Rollouts of a real engine, scored in float32 by transformers and by megatron-core, with replay and without."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.megatron_real.cpu", reason="megatron-core has an environment of its own: make test-megatron")

import torch
from torch import Tensor

from router_replay import RouterReplay, Trajectory, logprobs, measure, pack
from router_replay.engines import EmbeddedEngine, Request, Sampling
from router_replay.replay.megatron import MegatronReplay
from tests.megatron_real import tiny


def rollouts(hf: Any, spec: Any) -> list[Trajectory]:
    """Sampled in bfloat16, so that the engine chooses other experts here and there than a trainer in float32."""
    made = np.random.default_rng(0)
    prompts = [tuple(made.integers(0, tiny.VOCABULARY, 6).tolist()) for _ in range(8)]
    requests = [Request(prompt, Sampling(max_tokens=18, seed=number)) for number, prompt in enumerate(prompts)]
    found = []
    with EmbeddedEngine(copy.deepcopy(hf).to(torch.bfloat16), eos_token_id=[]) as engine:
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            trajectory = Trajectory(spec)
            trajectory.add(request, completion)
            found.append(trajectory)
    return found


def megatron_logprobs(chunk: Any, batch: Any) -> Tensor:
    own = torch.from_numpy(batch.sample_ids)
    mask = (own[:, None] != own[None]) | torch.triu(torch.ones(len(own), len(own)), 1).bool()
    tokens, labels = torch.from_numpy(batch.token_ids)[None], torch.from_numpy(batch.labels)[None].clamp(min=0)
    return -chunk(tokens, torch.from_numpy(batch.position_ids)[None], mask[None, None], labels=labels)[0]


@torch.no_grad()
def test_the_same_rollouts_get_the_same_logprobs_from_both_trainers() -> None:
    tiny.start()
    hf = tiny.hf_model()
    (chunk,) = tiny.megatron_model(hf)
    theirs, ours = RouterReplay(hf, agreement=True), MegatronReplay([chunk], agreement=True)
    batches = list(pack(rollouts(hf, ours.spec), max_tokens=64).bins())
    scores: dict[str, list[Tensor]] = {"hf": [], "megatron": [], "hf, live": [], "megatron, live": []}
    for batch in batches:
        with theirs.replay(batch):
            scores["hf"].append(logprobs(hf, batch))
        with ours.replay(batch):
            scores["megatron"].append(megatron_logprobs(chunk, batch))
        scores["hf, live"].append(logprobs(hf, batch))
        scores["megatron, live"].append(megatron_logprobs(chunk, batch))
    mask = np.concatenate([batch.label_mask for batch in batches])
    sampled = np.concatenate([batch.label_logprobs for batch in batches])
    of = {name: torch.cat([one.flatten() for one in found]).numpy() for name, found in scores.items()}

    assert mask.sum() == 8 * 18
    assert measure.logprob_gap(of["megatron"], of["hf"], mask).k3 < 1e-6
    assert measure.logprob_gap(of["megatron, live"], of["hf, live"], mask).k3 < 1e-6
    gaps = {name: measure.logprob_gap(found, sampled, mask).k3 for name, found in of.items()}
    assert gaps["megatron"] == pytest.approx(gaps["hf"], rel=1e-3)
    assert gaps["megatron"] < gaps["megatron, live"] / 2  # the mismatch is there, and replay repairs it in both
    assert gaps["hf"] < gaps["hf, live"] / 2
    assert ours.stats.agreement == theirs.stats.agreement
    assert ours.stats.agreement is not None
    assert min(ours.stats.agreement) < 1
