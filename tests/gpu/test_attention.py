"""Test packed attention on the device: as near to single sequences as the masked one, with gradients, also compiled."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from router_replay import RouterReplay, Sample, logprobs, pack
from router_replay.batch import Batch
from router_replay.forward import use_packed_attention
from tests.gpu.conftest import VOCABULARY, make_model
from tests.makers import random_routes

LENGTHS = (500, 131, 128, 65, 64, 17, 3, 1)
WINDOW = 48


def batch_of(replayer: RouterReplay, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Batch:
    """Sequences with random experts, so that rounding changes no choice."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(rng.integers(3, VOCABULARY, n), np.zeros(n), np.ones(n, bool), random_routes(n, replayer.spec, seed + n))
        for n in lengths
    ]
    return pack(samples, sum(lengths))


def windowed(model: Any) -> Any:
    """The same model whose attention sees WINDOW tokens."""
    model = copy.deepcopy(model)
    model.config.sliding_window = WINDOW
    for layer in model.model.layers:
        layer.self_attn.sliding_window = WINDOW
    return model


def run(model: Any, replayer: RouterReplay, batch: Batch) -> tuple[np.ndarray, torch.Tensor]:
    """The log-probs of a pass, and the gradient of the first query matrix."""
    model.zero_grad()
    with replayer.replay(batch):
        found = logprobs(model, batch)
        found.sum().backward()
    return found.detach().float().cpu().numpy(), model.model.layers[0].self_attn.q_proj.weight.grad.float().clone()


@pytest.mark.parametrize("kernel", ["auto", "flash"])
@pytest.mark.parametrize("window", [False, True], ids=["whole", "window"])
def test_packed_sequences_are_as_near_to_single_ones_as_with_a_mask(device: str, window: bool, kernel: str) -> None:
    """In each kind of attention, and as near to a model in float32, so that the kernel itself is as exact."""
    if kernel == "flash" and (device == "cpu" or importlib.util.find_spec("flash_attn") is None):
        pytest.skip("the package flash-attn, which needs a GPU, is not installed")
    model = windowed(make_model(0, device)) if window else make_model(0, device)
    replayer = RouterReplay(model)
    batch = batch_of(replayer)
    exact_model = copy.deepcopy(model).float()
    exact, exact_gradient = run_single(exact_model, RouterReplay(exact_model), batch)
    masked_alone, masked_alone_gradient = run_single(model, replayer, batch)
    masked, masked_gradient = run(model, replayer, batch)
    used = use_packed_attention(model, kernel)
    assert used == (kernel if kernel == "flash" else "varlen" if device == "cuda" else "segments")
    alone, alone_gradient = run_single(model, replayer, batch)
    packed, packed_gradient = run(model, replayer, batch)
    for what, ours, theirs in (
        ("to single sequences", packed - alone, masked - masked_alone),
        ("to float32", packed - exact, masked - exact),
    ):
        gap, gap_masked = np.abs(ours).mean(), np.abs(theirs).mean()
        assert gap <= 1.1 * gap_masked + 1e-6, f"mean |dlogp| {what}: {used} {gap}, masked {gap_masked}"
    for what, ours, theirs in (
        ("to single sequences", packed_gradient - alone_gradient, masked_gradient - masked_alone_gradient),
        ("to float32", packed_gradient - exact_gradient, masked_gradient - exact_gradient),
    ):
        off, off_masked = (float(one.norm() / exact_gradient.norm()) for one in (ours, theirs))
        assert off <= 1.1 * off_masked + 1e-3, f"gradients {what}: {used} {off}, masked {off_masked}"


def run_single(model: Any, replayer: RouterReplay, batch: Batch) -> tuple[np.ndarray, torch.Tensor]:
    """The same as `run`, with each sequence of the batch in a pass of its own."""
    order = np.argsort(-np.array(LENGTHS), kind="stable")
    alone = [run(model, replayer, pack_one(batch, int(number))) for number in order]
    return np.concatenate([found for found, _ in alone]), torch.stack([gradient for _, gradient in alone]).sum(0)


def pack_one(batch: Batch, number: int) -> Batch:
    """The batch of one of its samples."""
    inside = batch.sample_ids == number
    tokens = batch.token_ids[inside]
    assert batch.routes is not None
    rows = batch.routes.take(np.flatnonzero(inside))
    return pack([Sample(tokens, np.zeros(len(tokens)), np.ones(len(tokens), bool), rows)], len(tokens))


def test_new_lengths_do_not_compile_the_layers_again(device: str) -> None:
    """Bins of other lengths, and of other numbers of sequences, within the next power of two."""
    if device == "cpu":
        pytest.skip("on a CPU the groups of sequences are computed outside compiled code")
    model = make_model(0, device)
    replayer = RouterReplay(model)
    plain = copy.deepcopy(model)
    plain_replayer = RouterReplay(plain)
    for one in (model, plain):
        use_packed_attention(one)
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    bins = [(300, 200, 100, 60, 50), (400, 170, 90, 61, 33), (290, 280, 70, 20, 10, 9, 8), (500, 300, 11, 10, 9)]
    torch._dynamo.reset()
    counts = []
    for seed, lengths in enumerate(bins):
        batch = batch_of(replayer, lengths, seed)
        found, _ = run(model, replayer, batch)
        expected, _ = run(plain, plain_replayer, batch)
        assert np.abs(found - expected).mean() < 2e-2
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[-1] == counts[1], f"graphs after each bin: {counts}"
