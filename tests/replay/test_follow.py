"""Passes that find their own rows compute what `replay` computes on the same tokens, to the bit."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import InternVLConfig, InternVLForConditionalGeneration

from router_replay import RouteStore, logprobs, pack
from router_replay.errors import ReplayError
from router_replay.forward import use_packed_attention
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny
from tests.replay.following import (
    LAYOUTS,
    Laid,
    logits_of,
    packed,
    padded_left,
    padded_right,
    rows_of,
    samples_of,
    store_of,
)

LENGTHS = (7, 4, 9, 5)
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_logits_gradients_and_counts_of_replay(family: str, layout: Any) -> None:
    torch.set_num_threads(1)
    model = tiny.make(family).model
    replayer = RouterReplay(model)
    samples = samples_of(LENGTHS, replayer.spec)
    laid = layout(samples)
    idle = (laid.sample_T < 0) | (laid.place_T == np.array(LENGTHS)[laid.sample_T] - 1)
    with replayer.replay(rows_of(laid, samples), idle=idle):
        expected = logits_of(model, laid)
    counted = replayer.stats
    with replayer.follow(store_of(samples[::-1], replayer.spec)) as following:
        found = logits_of(model, laid)
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits_of(model, laid))
    assert equal(gradients(model, found.square().sum()), gradients(model, expected.square().sum()))
    assert replayer.stats.since(counted) == counted  # both counted the same rows as replayed and as live
    assert following.metrics() == {
        "routes/replayed": sum(LENGTHS) - len(LENGTHS), "routes/live": 0, "routes/ambiguous": 0, "routes/unmatched": 0,
        "routes/passes_followed": 1, "routes/passes_live": 0, "routes/evicted": 0,
    }  # fmt: skip


def test_shuffled_and_split_batches_find_their_rows(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    store = store_of(samples, replayer.spec)
    for order in ([2, 0, 3, 1], [1, 3], [3], [2, 1, 0]):
        part = [samples[number] for number in order]
        laid = padded_left(part)
        with replayer.replay(rows_of(laid, part)):
            expected = logits_of(model.model, laid)
        with replayer.follow(store):
            assert torch.equal(logits_of(model.model, laid), expected)


@pytest.mark.parametrize("attention", ["masked", "segments"])
def test_our_own_packed_log_probs_find_their_rows(attention: str, model: tiny.Tiny, replayer: RouterReplay) -> None:
    """With padding at the end of each sequence, of which a packed bin has no mask."""
    samples = samples_of(LENGTHS, replayer.spec)
    model.model.set_attn_implementation("sdpa")
    use_packed_attention(model.model, attention)
    batch = pack(samples, 64, pad_to_multiple_of=4)
    with replayer.replay(batch):
        expected = logprobs(model.model, batch)
    counted = replayer.stats
    with replayer.follow(store_of(samples, replayer.spec), pad_token_id=0):
        assert torch.equal(logprobs(model.model, batch), expected)
    assert replayer.stats.since(counted) == counted


def test_the_last_token_may_be_the_one_that_pads_others(model: tiny.Tiny, replayer: RouterReplay) -> None:
    short, long = samples_of((5, 6), replayer.spec)
    long = dataclasses.replace(long, token_ids=np.append(short.token_ids, 9))
    third = dataclasses.replace(samples_of([7], replayer.spec, 40)[0], token_ids=np.append(long.token_ids, 9))
    store = store_of([short, long], replayer.spec)
    for tokens, sample in ((short.token_ids, short), (long.token_ids, long), (third.token_ids, long)):
        with replayer.follow(store, pad_token_id=9), replayer.record() as recorded:
            model.model(input_ids=torch.from_numpy(tokens)[None])
        rows = len(sample) - 1
        assert sample.routes is not None
        assert np.array_equal(recorded.routes.ids[:rows], sample.routes.ids[:rows])


def test_a_model_that_embeds_its_tokens_itself_is_followed_by_them() -> None:
    """InternVL calls its decoder, here gpt-oss, with embeddings alone."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = tiny.make("gpt_oss").model.config
    config = InternVLConfig(vision_config={**vision, "image_size": 28}, text_config=text, image_token_id=1)
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration._from_config(config, attn_implementation="eager").train()
    replayer = RouterReplay(model)
    samples = samples_of(LENGTHS, replayer.spec)
    for layout in (padded_left, padded_right):
        laid = layout(samples)
        with replayer.replay(rows_of(laid, samples)):
            expected = logits_of(model, laid)
        with replayer.follow(store_of(samples, replayer.spec)) as following:
            assert torch.equal(logits_of(model, laid), expected)
        assert following.metrics()["routes/replayed"] == sum(LENGTHS) - len(LENGTHS)


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_the_layout_every_token_uses_its_own_row(data: st.DataObject) -> None:
    """Read from a recording inside the block: what the routers used, not what was planned."""
    model, replayer = MODEL
    lengths = data.draw(st.lists(st.integers(3, 8), min_size=1, max_size=5))
    samples = samples_of(lengths, replayer.spec, seed=data.draw(st.integers(0, 99)) * 10)
    order = data.draw(st.permutations(range(len(samples))))
    part = [samples[number] for number in order[: data.draw(st.integers(1, len(samples)))]]
    laid: Laid = data.draw(st.sampled_from(LAYOUTS))(part)
    store = store_of(samples, replayer.spec)
    with torch.no_grad(), replayer.follow(store) as following, replayer.record() as recorded:
        logits_of(model, laid)
    expected = rows_of(laid, part)
    assert np.array_equal(recorded.routes.ids[expected.captured], expected.ids[expected.captured])
    assert following.metrics()["routes/replayed"] == expected.captured.sum()
    assert following.metrics()["routes/live"] == following.metrics()["routes/ambiguous"] == 0


def make_model() -> tuple[Any, RouterReplay]:
    model = tiny.make("qwen3_moe").model
    return model, RouterReplay(model)


MODEL = make_model()


# -- cut sequences -----------------------------------------------------------------------------------


def test_a_sequence_without_its_last_tokens_uses_the_rows_that_it_has(model: tiny.Tiny, replayer: RouterReplay) -> None:
    (sample,) = samples_of([9], replayer.spec)
    store = store_of([sample], replayer.spec)
    for length in (8, 5, 1):
        inputs = {"input_ids": torch.from_numpy(sample.token_ids[:length])[None]}
        laid = Laid(inputs, np.zeros(length, int), np.arange(length))
        with replayer.replay(rows_of(laid, [sample])):
            expected = logits_of(model.model, laid)
        with replayer.follow(store) as following:
            assert torch.equal(logits_of(model.model, laid), expected)
        assert following.metrics()["routes/replayed"] == length  # the last one too: it predicts the next stored token


# -- blocks ------------------------------------------------------------------------------------------


def test_the_innermost_block_is_in_force(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_right(samples)
    other = random_routes(len(laid.sample_T), replayer.spec, 77)
    live = logits_of(model.model, laid)
    with replayer.replay(other):
        by_hand = logits_of(model.model, laid)
    with replayer.follow(store_of(samples, replayer.spec)) as following:
        followed = logits_of(model.model, laid)
        with replayer.replay(other):
            assert torch.equal(logits_of(model.model, laid), by_hand)
            with following_again(replayer, samples):
                assert torch.equal(logits_of(model.model, laid), followed)
        assert torch.equal(logits_of(model.model, laid), followed)
        with pytest.raises(ZeroDivisionError), replayer.replay(other):
            raise ZeroDivisionError
        assert torch.equal(logits_of(model.model, laid), followed)
    assert torch.equal(logits_of(model.model, laid), live)
    assert following.metrics()["routes/passes_followed"] == 3
    assert len({one.sum().item() for one in (live, by_hand, followed)}) == 3


def following_again(replayer: RouterReplay, samples: Any) -> Any:
    return replayer.follow(store_of(samples, replayer.spec))


def test_start_and_stop_do_what_a_with_statement_does(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_left(samples)
    live = logits_of(model.model, laid)
    following = replayer.follow(store_of(samples, replayer.spec))
    assert torch.equal(logits_of(model.model, laid), live)  # made, not started
    for _ in range(2):
        assert following.start() is following
        with pytest.raises(ReplayError, match="has started already: call stop"):
            following.start()
        with pytest.raises(ReplayError, match=r"detach\(\) was called inside"):
            replayer.detach()
        assert not torch.equal(logits_of(model.model, laid), live)
        following.stop()
        following.stop()  # nothing to stop
        assert torch.equal(logits_of(model.model, laid), live)
    assert following.metrics()["routes/passes_followed"] == 2
    replayer.detach()
    with pytest.raises(ReplayError, match="was detached"):
        following.start()


def test_a_pass_that_fails_is_not_counted_and_leaves_nothing(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_left(samples)
    with replayer.follow(store_of(samples, replayer.spec)) as following:
        expected = logits_of(model.model, laid)
        handle = model.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_of(model.model, laid)
        handle.remove()
        assert torch.equal(logits_of(model.model, laid), expected)
    assert following.metrics()["routes/passes_followed"] == replayer.stats.passes == 2


def test_a_router_that_is_called_between_passes_is_live(model: tiny.Tiny, replayer: RouterReplay) -> None:
    """The plan of a pass ends with it. The hidden states have as many rows as the pass had tokens."""
    samples = samples_of(LENGTHS, replayer.spec)
    laid, router = padded_left(samples), model.model.model.layers[0].mlp.gate
    hidden = torch.randn(len(laid.sample_T), model.model.config.hidden_size)
    live = router(hidden)
    with replayer.follow(store_of(samples, replayer.spec)):
        logits_of(model.model, laid)
        assert all(map(torch.equal, router(hidden), live))


def test_agreement_is_counted_as_in_replay(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_right(samples)
    with replayer.replay(rows_of(laid, samples), agreement=True):
        logits_of(model.model, laid)
    expected = replayer.stats
    with replayer.follow(store_of(samples, replayer.spec), agreement=True):
        logits_of(model.model, laid)
    assert replayer.stats.since(expected).agreement == expected.agreement is not None


def test_the_store_is_filled_by_threads_while_passes_run(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    store, laid, stop = store_of(samples, replayer.spec), packed(samples), threading.Event()

    def fill(seed: int) -> None:
        for number in range(50):
            for one in samples_of((6, 3), replayer.spec, seed=1000 * seed + 2 * number):
                store.add_trajectory(one)
        stop.set()

    with replayer.replay(rows_of(laid, samples)):
        expected = logits_of(model.model, laid)
    threads = [threading.Thread(target=fill, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    passes = 0
    with replayer.follow(store):
        while passes < 2 or not stop.is_set():
            assert torch.equal(logits_of(model.model, laid), expected)
            passes += 1
    for thread in threads:
        thread.join()
    assert len(store) > len(samples)


# -- backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_recompute_uses_the_rows_of_its_own_forward(reentrant: bool, inside: bool) -> None:
    """Two micro-batches and a live pass, whose graphs are open together; backward in and after the block."""
    torch.set_num_threads(1)
    plain, checkpointed = tiny.make("qwen3_moe").model, tiny.make("qwen3_moe").model
    by_hand, replayer = RouterReplay(plain), RouterReplay(checkpointed)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    samples = samples_of(LENGTHS, replayer.spec)
    parts = [samples[:2], samples[2:]]
    expected = []
    for part in parts:
        laid = padded_left(part)
        with by_hand.replay(rows_of(laid, part)):
            expected.append(gradients(plain, logits_of(plain, laid).square().sum()))
    expected.append(gradients(plain, logits_of(plain, padded_left(samples)).square().sum()))

    following = replayer.follow(store_of(samples, replayer.spec)).start()
    losses = [logits_of(checkpointed, padded_left(part)).square().sum() for part in parts]
    following.stop()
    losses.append(logits_of(checkpointed, padded_left(samples)).square().sum())
    if inside:
        following.start()
    for number in (1, 0, 2):
        assert equal(gradients(checkpointed, losses[number]), expected[number]), number
    following.stop()
    assert following.metrics()["routes/passes_followed"] == 2  # a recompute is no pass of its own


def test_gradients_add_up_over_micro_batches(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = [padded_left(samples[:2]), padded_left(samples[2:])]
    for one, part in zip(laid, (samples[:2], samples[2:]), strict=True):
        with replayer.replay(rows_of(one, part)):
            logits_of(model.model, one).square().sum().backward()
    expected = [one.grad.clone() for one in model.model.parameters()]
    model.model.zero_grad(set_to_none=True)
    with replayer.follow(store_of(samples, replayer.spec)):
        for one in laid:
            logits_of(model.model, one).square().sum().backward()
    assert equal([one.grad for one in model.model.parameters()], expected)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_layers_and_models_use_their_rows(whole: bool, model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    model.model.set_experts_implementation("batched_mm")
    compiled = model.model
    torch._dynamo.reset()
    if whole:
        compiled = torch.compile(model.model, backend="eager")
    else:
        for layer in model.model.model.layers:
            layer.mlp.forward = torch.compile(layer.mlp.forward, backend="eager")
    for part in (samples, samples[::-1]):
        laid = padded_right(part)
        with replayer.replay(rows_of(laid, part)):
            expected = logits_of(model.model, laid)
        before = replayer.stats
        with replayer.follow(store_of(samples, replayer.spec)):
            torch.testing.assert_close(logits_of(compiled, laid), expected)
        assert replayer.stats.since(before).passes == 1
        assert replayer.stats.since(before).rows_replayed[0] == sum(LENGTHS) - len(LENGTHS)
    torch._dynamo.reset()


def test_a_store_of_many_experts_keeps_two_bytes() -> None:
    model = tiny.make("qwen3_moe", num_experts=300, moe_intermediate_size=8).model
    replayer = RouterReplay(model)
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_left(samples)
    with replayer.replay(rows_of(laid, samples)):
        expected = logits_of(model, laid)
    store: RouteStore = store_of(samples, replayer.spec)
    with replayer.follow(store):
        assert torch.equal(logits_of(model, laid), expected)
