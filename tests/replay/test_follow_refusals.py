"""A row that bears loss and is not in the store raises, with the place and what to do, or is counted where asked."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from router_replay import RouterSpec, Routes, RouteStore, Sample
from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny
from tests.replay.following import logits_of, packed, padded_left, padded_right, rows_of, samples_of, store_of

LENGTHS = (7, 4, 9)


def with_tokens(sample: Sample, tokens: Any) -> Sample:
    return dataclasses.replace(sample, token_ids=np.asarray(tokens))


def refused(replayer: RouterReplay, model: Any, store: RouteStore, laid: Any, match: str, **options: Any) -> None:
    with replayer.follow(store, **options) as following, pytest.raises(ReplayError, match=match):
        logits_of(model, laid)
    assert following.metrics()["routes/passes_followed"] == replayer.stats.passes == 0


# -- no match ----------------------------------------------------------------------------------------


def test_a_sequence_that_departs_is_named_with_the_place(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    store = store_of(samples, replayer.spec)
    wrong = samples[2].token_ids.copy()
    wrong[5] = 63 if wrong[5] != 63 else 62
    laid = padded_left([samples[0], samples[1], with_tokens(samples[2], wrong)])
    refused(
        replayer, model.model, store, laid,
        rf"sequence 2 of this pass \(9 tokens, batch row 2, from column 0 on\) is not in the store: it departs from "
        rf"the nearest of 3 stored sequences at token 5, where the stored one of 9 tokens has "
        rf"{samples[2].token_ids[5]} and this one has {wrong[5]}\. Add its routes before the pass, .* or pass "
        r'on_missing="live"',
    )  # fmt: skip


def test_a_sequence_that_goes_on_is_named_with_the_end(model: tiny.Tiny, replayer: RouterReplay) -> None:
    (sample,) = samples_of([5], replayer.spec)
    store = store_of([sample], replayer.spec)
    longer = with_tokens(sample, [*sample.token_ids, 7, 8])
    refused(
        replayer, model.model, store, padded_left([longer]),
        r"ends at token 5, and this one goes on with 7\. Add",
    )  # fmt: skip
    with_mask = padded_left([with_tokens(sample, [*sample.token_ids, 0, 0])])
    refused(replayer, model.model, store, with_mask, r"goes on with 0\. Add")
    without = dataclasses.replace(with_mask, inputs={"input_ids": with_mask.inputs["input_ids"]})
    refused(
        replayer, model.model, store, without,
        r"goes on with 0 up to its end; if that is padding, pass an attention_mask, or pad_token_id=0 to follow\(\)",
    )  # fmt: skip


def test_an_empty_store_and_one_that_sequences_have_left_say_so(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_left(samples)
    refused(replayer, model.model, RouteStore(replayer.spec), laid, "the store is empty")
    small = RouteStore(replayer.spec, max_bytes=9 * (8 + replayer.spec.row_bytes) + 16)
    for one in samples:
        small.add_trajectory(one)
    refused(replayer, model.model, small, laid, "2 sequences have left the store: raise its max_bytes")


def test_the_same_tokens_at_another_start_are_no_match(model: tiny.Tiny, replayer: RouterReplay) -> None:
    """A prompt that was cut on its left: the rows depend on the tokens that are gone."""
    samples = samples_of([9], replayer.spec)
    cut = with_tokens(samples[0], samples[0].token_ids[2:])
    refused(replayer, model.model, store_of(samples, replayer.spec), padded_left([cut]), "departs .* at token 0")


def test_live_routes_and_counts_what_is_not_there(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    laid = padded_right(samples)
    store = store_of(samples[:2], replayer.spec)
    rows = rows_of(laid, samples)
    known = Routes(rows.ids, rows.spec, rows.captured & (laid.sample_T < 2))
    with replayer.replay(known):
        expected = logits_of(model.model, laid)
    before = replayer.stats
    with replayer.follow(store, on_missing="live") as following:
        assert torch.equal(logits_of(model.model, laid), expected)
    counts = following.metrics()
    assert (counts["routes/replayed"], counts["routes/live"], counts["routes/unmatched"]) == (6 + 3, 8, 1)
    assert replayer.stats.since(before).rows_live[0] == 8
    live = logits_of(model.model, laid)
    with replayer.follow(RouteStore(replayer.spec), on_missing="live") as following:
        assert torch.equal(logits_of(model.model, laid), live)
    assert following.metrics()["routes/live"] == sum(LENGTHS) - 3
    assert replayer.stats.since(before).passes == 2


def test_live_uses_the_rows_of_a_sequence_that_goes_on(model: tiny.Tiny, replayer: RouterReplay) -> None:
    (sample,) = samples_of([5], replayer.spec)
    longer = with_tokens(sample, [*sample.token_ids, 7, 8])
    store = store_of([sample], replayer.spec)
    with replayer.follow(store, on_missing="live") as following, replayer.record() as recorded:
        logits_of(model.model, padded_left([longer]))
    assert sample.routes is not None
    assert np.array_equal(recorded.routes.ids[:4], sample.routes.ids[:4])
    counts = following.metrics()
    assert (counts["routes/replayed"], counts["routes/live"], counts["routes/unmatched"]) == (4, 2, 1)


# -- missing rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [2, 5])
def test_a_missing_row_that_bears_loss_raises(row: int, model: tiny.Tiny, replayer: RouterReplay) -> None:
    routes = random_routes(6, replayer.spec)
    tokens, missing = [3, 4, 5, 6, 7, 8, 9], np.arange(6) != row
    laid = padded_left([with_tokens(samples_of([7], replayer.spec)[0], tokens)])
    strict, masked = RouteStore(replayer.spec), RouteStore(replayer.spec)
    strict.add(tokens, Routes(routes.ids, replayer.spec, missing))
    masked.add(tokens, Routes(routes.ids, replayer.spec, missing), loss_mask=[0, 0, 0, 0, 1, 1, 1])
    refused(replayer, model.model, strict, laid, f"1 of its rows that bear loss are missing, the first is row {row}")
    if row == 5:
        refused(replayer, model.model, masked, laid, "the first is row 5")
        return
    with replayer.follow(masked) as following:  # a row of the prompt, which predicts no token of the loss
        logits_of(model.model, laid)
    assert (following.metrics()["routes/replayed"], following.metrics()["routes/live"]) == (5, 1)
    with replayer.follow(strict, on_missing="live") as following:
        logits_of(model.model, laid)
    assert (following.metrics()["routes/replayed"], following.metrics()["routes/live"]) == (5, 1)


def test_the_last_row_of_a_cut_sequence_bears_the_loss_of_the_token_that_is_cut(
    model: tiny.Tiny, replayer: RouterReplay
) -> None:
    """A trainer that leaves the last token out of the inputs still predicts it."""
    tokens, store = [3, 4, 5, 6, 7], RouteStore(replayer.spec)
    store.add(tokens, Routes(random_routes(4, replayer.spec).ids, replayer.spec, [True, True, True, False]))
    laid = padded_left([with_tokens(samples_of([4], replayer.spec)[0], tokens[:4])])
    refused(replayer, model.model, store, laid, "the first is row 3")
    with replayer.follow(store, on_missing="live") as following:
        logits_of(model.model, laid)
    assert (following.metrics()["routes/replayed"], following.metrics()["routes/live"]) == (3, 1)


def test_padding_and_single_tokens_need_no_rows(model: tiny.Tiny, replayer: RouterReplay) -> None:
    """The end of a packed bin, and a row of padding that a trainer adds to fill its batch."""
    samples = samples_of([5, 4], replayer.spec)
    store = store_of(samples, replayer.spec)
    laid = packed(samples)
    tail = {"input_ids": torch.tensor([[0, 0]]), "position_ids": torch.tensor([[0, 0]])}
    inputs = {name: torch.cat([laid.inputs[name], tail[name]], dim=1) for name in laid.inputs}
    with replayer.follow(store) as following:
        logits_of(model.model, dataclasses.replace(laid, inputs=inputs))
        empty = padded_left(samples)
        empty.inputs["attention_mask"][1] = 0
        logits_of(model.model, empty)
    assert following.metrics()["routes/live"] == 0
    assert following.metrics()["routes/replayed"] == 4 + 3 + 4


# -- the same tokens twice ---------------------------------------------------------------------------


def test_keys_tell_samples_with_the_same_tokens_apart(model: tiny.Tiny, replayer: RouterReplay) -> None:
    first, second = (samples_of([6], replayer.spec, seed)[0] for seed in (1, 2))
    second = with_tokens(second, first.token_ids)
    store = RouteStore(replayer.spec)
    for key, one in (("a", first), ("b", second)):
        store.add_trajectory(one, key=key)
    for names, part in ((["b", "a"], [second, first]), (["a", "b", "b"], [first, second, second])):
        laid = padded_left(part)
        with replayer.replay(rows_of(laid, part)):
            expected = logits_of(model.model, laid)
        with replayer.follow(store) as following, following.keys(names):
            assert torch.equal(logits_of(model.model, laid), expected)
        assert following.metrics()["routes/ambiguous"] == 0
    laid = padded_left([second, second])
    with replayer.replay(rows_of(laid, [first, first])):
        expected = logits_of(model.model, laid)
    before = replayer.stats
    with replayer.follow(store) as following:
        assert torch.equal(logits_of(model.model, laid), expected)  # the first capture wins
        assert following.metrics()["routes/ambiguous"] == 2
        with following.keys([None, "b"]):
            logits_of(model.model, laid)
    assert following.metrics()["routes/ambiguous"] == 3
    assert replayer.stats.since(before).sequences_ambiguous == 3


def test_keys_that_do_not_fit_raise(model: tiny.Tiny, replayer: RouterReplay) -> None:
    samples = samples_of(LENGTHS, replayer.spec)
    store, laid = RouteStore(replayer.spec), padded_left(samples)
    for number, one in enumerate(samples):
        store.add_trajectory(one, key=number)
    following = replayer.follow(store)
    with following, following.keys([0, 1]), pytest.raises(ReplayError, match="expected 3, got 2"):
        logits_of(model.model, laid)
    with (
        following,
        following.keys([0, 7, 2]),
        pytest.raises(ReplayError, match=r"its tokens are, but not with the key 7 \(keys of these tokens: 1\)"),
    ):
        logits_of(model.model, laid)
    with following:
        logits_of(model.model, laid)  # the keys ended with their block


# -- arguments ---------------------------------------------------------------------------------------


def test_what_cannot_be_followed_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    with pytest.raises(ReplayError, match=r"follow\(\) needs a RouteStore, got dict"):
        replayer.follow({})  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match="the store is of another model"):
        replayer.follow(RouteStore(RouterSpec(4, 2, (0,))))
    with pytest.raises(ReplayError, match='on_missing must be "raise" or "live"'):
        replayer.follow(RouteStore(replayer.spec), on_missing="zero")  # type: ignore[arg-type]
    with replayer.follow(RouteStore(replayer.spec)):
        embedded = model.model.get_input_embeddings()(model.inputs["input_ids"])
        with pytest.raises(ReplayError, match="the decoder got no input_ids"):
            model.model(inputs_embeds=embedded)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile its layers"):
            torch.compile(model.model, backend="eager", fullgraph=True)(**model.inputs)
        torch._dynamo.reset()
    model.forward()


def test_a_pass_in_another_thread_is_refused(model: tiny.Tiny, replayer: RouterReplay) -> None:
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            model.forward()
        except ReplayError as error:
            caught.append(error)

    with replayer.follow(RouteStore(replayer.spec)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "another thread" in str(caught[0])
