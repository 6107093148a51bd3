"""Test replay and recording on the device in bfloat16, with the experts implementation that is the default there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from router_replay import Sample, logprobs, pack
from router_replay.measure import logprob_gap
from tests.gpu.conftest import VOCABULARY, Trainer
from tests.makers import random_routes

LENGTHS = (17, 64, 5, 120, 33, 80)


def samples_with(trainer: Trainer, seed: int) -> list[Sample]:
    """Random sequences, with random rows."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rng.integers(3, VOCABULARY, length), np.zeros(length, np.float32), np.ones(length, bool),
            random_routes(length, trainer.replayer.spec, seed + length),
        )
        for length in LENGTHS
    ]  # fmt: skip


def test_the_experts_run_as_one_grouped_product(trainer: Trainer, device: str) -> None:
    if device != "cuda":
        pytest.skip("another implementation may be the default on a CPU")
    assert trainer.model.config._experts_implementation == "grouped_mm"


def test_replaying_a_recording_gives_the_same_bits(trainer: Trainer) -> None:
    batch = pack(samples_with(trainer, 0), sum(LENGTHS))
    with torch.no_grad(), trainer.replayer.record() as recording:
        live = logprobs(trainer.model, batch)
    for rows in (recording, recording.routes):  # on the device, and through the host
        with torch.no_grad(), trainer.replayer.replay(rows):
            assert torch.equal(logprobs(trainer.model, batch), live)


def test_replayed_rows_are_used_and_recorded_as_they_were_given(trainer: Trainer) -> None:
    batch = pack(samples_with(trainer, 1), sum(LENGTHS))
    with torch.no_grad():
        live = logprobs(trainer.model, batch)
        with trainer.replayer.replay(batch), trainer.replayer.record() as recording:
            replayed = logprobs(trainer.model, batch)
    assert recording.routes == batch.routes
    assert not torch.equal(replayed, live)


def test_gradients_of_a_replayed_recording_are_the_live_ones(trainer: Trainer) -> None:
    batch = pack(samples_with(trainer, 2), sum(LENGTHS))
    router = trainer.model.model.layers[3].mlp.gate.weight

    def gradient() -> torch.Tensor:
        logprobs(trainer.model, batch).sum().backward()
        found = router.grad.float().clone()
        trainer.model.zero_grad()
        return found

    with trainer.replayer.record() as recording:
        live = gradient()
    with trainer.replayer.replay(recording):
        replayed = gradient()
    with trainer.replayer.replay(batch):
        other = gradient()
    # Kernels on a GPU may add in another order each time.
    assert torch.dist(replayed, live) <= 0.02 * torch.dist(other, live)


def test_packed_sequences_do_not_see_each_other(trainer: Trainer) -> None:
    """Compare each sequence alone with itself in a packed batch. The scale for bfloat16 is what other rows change."""
    samples, others = samples_with(trainer, 3), samples_with(trainer, 4)
    swapped = [Sample(a.token_ids, a.logprobs, a.loss_mask, b.routes) for a, b in zip(samples, others, strict=True)]
    packed = {}
    for name, group in (("right", samples), ("other rows", swapped)):
        batch = pack(group, sum(LENGTHS))
        with torch.no_grad(), trainer.replayer.replay(batch):
            packed[name] = batch.per_sample(logprobs(trainer.model, batch).cpu())
    alone = []
    for sample in samples:
        batch = pack([sample], len(sample.token_ids))
        with torch.no_grad(), trainer.replayer.replay(batch):
            alone.append(logprobs(trainer.model, batch).cpu().numpy())
    gap = {name: logprob_gap(np.concatenate(alone), np.concatenate(found)).k3 for name, found in packed.items()}
    assert gap["right"] < 0.02 * gap["other rows"]
