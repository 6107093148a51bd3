"""Which passes are followed: those of the policy in training. Others stay live unless the caller asks for them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import peft
import pytest
import torch
from transformers import DynamicCache

from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.replay import tiny
from tests.replay.following import logits_of, padded_left, padded_right, rows_of, samples_of, store_of

LENGTHS = (7, 4, 9)


def lora() -> Any:
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    made = peft.get_peft_model(tiny.make("qwen3_moe").model, settings)
    made.add_adapter("ref", settings)
    for name, parameter in made.named_parameters():
        if "lora_" in name:  # B is zero at first, and an adapter that does nothing would hide one that is left out
            parameter.data.normal_(std=0.2)
    return made.train()


def test_evaluation_is_live_unless_asked(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid, store = padded_left(samples), store_of(samples, replayer.spec)
    live = logits_of(model.model, laid)
    with replayer.follow(store) as following:
        followed = logits_of(model.model, laid)
        with torch.no_grad():
            assert torch.equal(logits_of(model.model, laid), followed)  # the old policy is scored in training mode
        model.model.eval()
        assert torch.equal(logits_of(model.model, laid), live)
        logits_of(model.model, padded_left(samples_of([5], replayer.spec, 50)))  # tokens that are not in the store
        with replayer.follow(store, evaluation=True) as asked:
            assert torch.equal(logits_of(model.model, laid), followed)
    assert following.metrics()["routes/passes_followed"] == 2
    assert following.metrics()["routes/passes_live"] == 2
    assert asked.metrics()["routes/passes_followed"] == 1
    assert replayer.stats.passes == 3


@pytest.mark.parametrize("checkpointed", [True, False])
def test_other_adapters_are_the_references_and_stay_live_unless_asked(checkpointed: bool) -> None:
    torch.set_num_threads(1)
    model = lora()
    if checkpointed:
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    replayer = RouterReplay(model)
    samples = samples_of(LENGTHS, replayer.spec)
    laid, store = padded_left(samples), store_of(samples, replayer.spec)
    rows = rows_of(laid, samples)

    @contextlib.contextmanager
    def use_adapter(name: str) -> Any:
        before = model.active_adapter
        model.set_adapter(name)
        try:
            yield
        finally:
            model.set_adapter(before)

    references = (model.disable_adapter, lambda: use_adapter("ref"))
    live, replayed = [], []
    for reference in references:
        with reference():
            live.append(logits_of(model, laid))
            with replayer.replay(rows):
                replayed.append(logits_of(model, laid))
    with replayer.replay(rows):
        policy = logits_of(model, laid)
    before = replayer.stats
    with replayer.follow(store) as following:
        for reference, expected in zip(references, live, strict=True):
            assert torch.equal(logits_of(model, laid), policy)
            with reference(), torch.no_grad():
                assert torch.equal(logits_of(model, laid), expected)
        logits_of(model, laid).sum().backward()  # a checkpoint after a live pass recomputes with its rows
    counts = following.metrics()
    assert (counts["routes/passes_followed"], counts["routes/passes_live"]) == (3, 2)
    assert replayer.stats.since(before).passes == 3
    with replayer.follow(store, reference=True):
        for reference, expected in zip(references, replayed, strict=True):
            with reference():
                assert torch.equal(logits_of(model, laid), expected)


def test_a_reference_model_is_never_touched(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_left(samples)
    live = logits_of(model.model, laid)
    with replayer.follow(store_of(samples, replayer.spec)):
        reference = copy.deepcopy(model.model)
        assert torch.equal(logits_of(reference, laid), live)
        assert not torch.equal(logits_of(model.model, laid), live)


def test_generation_is_live_in_training_mode_too(model: tiny.Tiny, replayer: RouterReplay) -> None:
    """`generate` brings a cache of its own. A pass with a gradient and such a cache cannot be followed."""
    samples = samples_of(LENGTHS, replayer.spec)
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    prompt = {"input_ids": torch.tensor([[60, 61, 62]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    expected = model.model.generate(**prompt, **options)
    with replayer.follow(store_of(samples, replayer.spec)) as following:
        assert torch.equal(model.model.generate(**prompt, **options), expected)
        assert following.metrics()["routes/passes_live"] == 4
        cache = DynamicCache(config=model.model.config)
        laid = padded_right(samples[:1])
        followed = logits_of(model.model, laid)
        assert torch.equal(model.model(**laid.inputs, past_key_values=cache).logits, followed)  # an empty cache
        with pytest.raises(ReplayError, match="a key-value cache that holds tokens already"):
            model.model(**laid.inputs, past_key_values=cache)
    assert following.metrics()["routes/passes_followed"] == 2
