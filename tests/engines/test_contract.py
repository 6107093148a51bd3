"""The contract of every engine: the same tests over all of them, on real engines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.engines.conftest import (
    GREEDY,
    LONG,
    PROMPT_TOKENS,
    Checkpoints,
    Sampled,
    Trainer,
    ended_before,
    midway,
    one,
    prompt,
    same,
)
from tests.makers import random_routes


def test_every_token_but_the_last_has_a_row(engine: Engine) -> None:
    completion = one(engine, Request(prompt(), GREEDY))
    assert len(completion.token_ids) == len(completion.logprobs) == 20
    assert len(completion.routes) == PROMPT_TOKENS + 20 - 1
    assert completion.routes.spec == engine.spec == RouterSpec(16, 4, (1, 2, 3))
    assert completion.finish_reason == "length"
    assert completion.start == 0
    assert (completion.logprobs <= 0).all()
    assert set(completion.versions) == set(completion.routes.versions) == {0}


def test_an_engine_that_answers_says_so(engine: Engine) -> None:
    engine.ping()


def test_the_same_request_gives_the_same_answer_alone_and_in_a_batch(engine: Engine) -> None:
    alone = [one(engine, Request(prompt(seed), GREEDY)) for seed in range(3)]
    together = engine.generate([Request(prompt(seed), GREEDY) for seed in range(3)])
    for first, second in zip(alone, together, strict=True):
        assert np.array_equal(first.token_ids, second.token_ids)
        assert np.abs(first.logprobs - second.logprobs).max() < 1e-4  # another batch, other rounding


def test_log_probs_are_those_at_the_temperature(engine: Engine, checkpoints: Checkpoints, trainer: Trainer) -> None:
    for temperature in (0.5, 1.0, 1.5):
        completion = one(engine, Request(prompt(), Sampling(12, temperature, ignore_eos=True)))
        theirs = trainer.logprobs(checkpoints.a, prompt(), completion, temperature=temperature)
        assert np.abs(theirs - completion.logprobs).max() < 1e-4


def test_each_of_n_samples_has_its_own_rows(engine: Engine) -> None:
    request = Request(prompt(), Sampling(max_tokens=12, n=3, ignore_eos=True))
    samples = engine.generate([request])
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 3
    for sample in samples:
        assert sample.request_id == request.id
        assert sample.routes[:PROMPT_TOKENS].same_sets(samples[0].routes[:PROMPT_TOKENS])
        again = one(engine, Request((*prompt(), *sample.token_ids.tolist()), Sampling(max_tokens=1)))
        agreeing = (np.sort(again.routes.ids[:81], -1) == np.sort(sample.routes.ids, -1)).all(-1).mean()
        assert agreeing > 0.99  # these tokens' rows, up to a near tie that batching rounded the other way


@pytest.mark.parametrize("start", [0, 1, 33, PROMPT_TOKENS - 1])
def test_rows_before_the_start_are_left_out(engine: Engine, start: int) -> None:
    whole = one(engine, Request(prompt(), GREEDY))
    part = one(engine, Request(prompt(), GREEDY, start=start))
    assert part.start == start
    assert part.routes.same_sets(whole.routes[start:])


def test_generation_stops_at_the_end_of_sequence_and_at_stop_tokens(engine: Engine) -> None:
    free = one(engine, Request(prompt(), GREEDY))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    stopped = one(engine, Request(prompt(), Sampling(20, 0.0, stop_token_ids=(stop,), ignore_eos=True)))
    assert stopped.finish_reason == "stop"
    assert np.array_equal(stopped.token_ids, free.token_ids[: first + 1])
    sampled = engine.generate([Request(prompt(seed), Sampling(max_tokens=150, n=4)) for seed in range(2)])
    ended = [sample for sample in sampled if sample.finish_reason == "stop"]
    assert ended  # of 8 samples at a chance of some 1/128 a token
    assert all(sample.token_ids[-1] == 1 and 1 not in sample.token_ids[:-1] for sample in ended)


# -- forced routes ------------------------------------------------------------------------------------


def test_forcing_an_engines_own_rows_changes_nothing(engine: Engine) -> None:
    free = one(engine, Request(prompt(), GREEDY))
    forced = one(engine, Request(prompt(), GREEDY, forced_routes=free.routes[:PROMPT_TOKENS]))
    assert np.abs(forced.logprobs - free.logprobs).max() == 0.0
    assert same(forced, free)


def test_forced_rows_of_another_come_back_and_change_the_answer(engine: Engine) -> None:
    free = one(engine, Request(prompt(), GREEDY))
    foreign = random_routes(PROMPT_TOKENS, engine.spec, seed=1).with_versions(7)
    forced = one(engine, Request(prompt(), GREEDY, forced_routes=foreign))
    assert forced.routes[:PROMPT_TOKENS].same_sets(foreign)
    assert np.abs(forced.logprobs - free.logprobs).max() > 0.1
    assert set(forced.routes[:PROMPT_TOKENS].versions) == {7}  # who routed them first
    assert set(forced.routes[PROMPT_TOKENS:].versions) == set(forced.versions) == {0}
    assert same(one(engine, Request(prompt(), GREEDY)), free)  # nothing of it was left in a cache


def test_uncaptured_rows_and_rows_beyond_the_forced_are_routed_live(engine: Engine) -> None:
    free = one(engine, Request(prompt(), GREEDY))
    foreign = random_routes(40, engine.spec, seed=2)
    captured = np.ones(40, bool)
    captured[::3] = False
    holes = Routes(foreign.ids, engine.spec, captured=captured)
    forced = one(engine, Request(prompt(), GREEDY, forced_routes=holes))
    assert np.array_equal(np.sort(forced.routes.ids[:40][captured], -1), np.sort(foreign.ids[captured], -1))
    assert np.array_equal(np.sort(forced.routes.ids[0], -1), np.sort(free.routes.ids[0], -1))  # row 0 is a hole
    live = (np.sort(forced.routes.ids[40:], -1) != np.sort(foreign.ids[-1], -1)).any(-1)
    assert live.mean() > 0.9


def test_forced_and_free_requests_share_a_batch(engine: Engine) -> None:
    requests, forced = [], {}
    for seed in range(6):
        rows = random_routes(PROMPT_TOKENS - seed, engine.spec, seed=seed) if seed % 2 else None
        requests.append(Request(prompt(seed), GREEDY, forced_routes=rows))
        forced[seed] = rows
    for seed, completion in enumerate(engine.generate(requests)):
        rows = forced[seed]
        if rows is not None:
            assert completion.routes[: len(rows)].same_sets(rows)
        else:
            assert np.array_equal(completion.token_ids, one(engine, Request(prompt(seed), GREEDY)).token_ids)


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "the prompt is empty"),
        (Request((5, 6), start=2), r"start must lie in \[0, 1\]"),
        (Request((5, 6), Sampling(max_tokens=0)), "max_tokens"),
        (Request((5, 6), forced_routes=random_routes(2, RouterSpec(8, 2, (0,)))), "another model"),
        (Request((5, 6), forced_routes=random_routes(3, RouterSpec(16, 4, (1, 2, 3)))), "3 forced rows"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_sent(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        engine.generate([request_])


# -- abort, pause, weights ----------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def started(engine: Engine, *requests: Request, seconds: float) -> list[asyncio.Task[list[Completion]]]:
    tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
    await asyncio.sleep(seconds)
    return tasks


def test_a_seed_gives_the_same_sample_again_beside_others(engine: Engine) -> None:
    """Also where the prompt takes several steps, and where others come and go meanwhile."""
    seeded = Request(prompt(), Sampling(24, n=2, seed=11, ignore_eos=True))
    alone = engine.generate([seeded])
    others = [Request(prompt(seed), Sampling(4 + seed, seed=seed, ignore_eos=True)) for seed in range(1, 5)]
    beside = engine.generate([*others, dataclasses.replace(seeded, id="again")])[-2:]
    other = engine.generate([Request(prompt(), Sampling(24, n=2, seed=12, ignore_eos=True))])
    for a, b, c in zip(alone, beside, other, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert not np.array_equal(a.token_ids, c.token_ids)
    assert not np.array_equal(alone[0].token_ids, alone[1].token_ids)


def test_abort_returns_what_there_is(engine: Engine, sampled: Sampled | None) -> None:
    async def work() -> None:
        stays, goes = Request(prompt(0), LONG), Request(prompt(1), Sampling(150, n=2, ignore_eos=True))
        aborted: list[Completion] = []
        whole, partial = await midway(
            engine,
            [stays, goes],
            lambda: aborted.extend(engine.abort([goes.id])),
            too_late=lambda landed: any(completion.finish_reason == "length" for completion in landed[1]),
            sampled=sampled,
        )
        assert [completion.request_id for completion in aborted[-2:]] == [goes.id, goes.id]
        assert whole[0].finish_reason == "length"
        for completion in partial:
            assert completion.finish_reason == "abort"
            assert 0 < len(completion.token_ids) < 150
            assert len(completion.routes) == PROMPT_TOKENS + len(completion.token_ids) - 1

    run(work())


def test_who_stops_waiting_costs_nobody_else_anything(engine: Engine) -> None:
    """Also where somebody aborts all at the same moment: who gave up gets nothing, the others what there is."""

    async def work() -> None:
        for _ in range(3):
            gone, stays = await started(engine, Request(prompt(0), LONG), Request(prompt(1), LONG), seconds=0.1)
            abort = asyncio.create_task(asyncio.to_thread(engine.abort))
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            [landed] = await stays
            aborted = [one.request_id for one in await abort]
            if landed.finish_reason == "abort":  # the abort may come when nothing has started, or too late
                assert landed.request_id in aborted
            else:
                assert len(landed.token_ids) == 150

    before = one(engine, Request(prompt(), GREEDY))
    run(work())
    assert same(before, one(engine, Request(prompt(), GREEDY)))


def test_abort_before_the_first_token_gives_an_empty_completion(engine: Engine) -> None:
    async def work() -> None:
        engine.pause()
        [task] = await started(engine, Request(prompt(), LONG, start=3), seconds=0.1)
        [aborted] = await asyncio.to_thread(engine.abort)
        [completion] = await task
        assert completion is aborted
        assert (len(completion.token_ids), len(completion.routes), completion.finish_reason) == (0, 0, "abort")

    run(work())


def test_a_paused_engine_keeps_its_requests(engine: Engine) -> None:
    async def work() -> None:
        for seconds in (0.1, 0.05, 0.02, 0.0):  # a fast machine may be through before the pause arrives
            [task] = await started(engine, Request(prompt(), LONG), seconds=seconds)
            await asyncio.to_thread(engine.pause, "keep")
            if not task.done():
                break
            await asyncio.to_thread(engine.resume)
        await asyncio.sleep(0.5)
        assert not task.done()
        await asyncio.to_thread(engine.resume)
        [completion] = await task
        assert completion.finish_reason == "length"

    run(work())


@pytest.mark.parametrize("in_flight", ["abort", "wait"])
def test_a_pause_ends_or_waits_for_its_requests_as_asked(
    engine: Engine, sampled: Sampled | None, in_flight: Any
) -> None:
    async def work() -> None:
        [[completion]] = await midway(
            engine,
            [Request(prompt(), LONG)],
            lambda: engine.pause(in_flight),
            lambda: engine.resume(),
            lambda landed: in_flight == "abort" and landed[0][0].finish_reason == "length",
            sampled,
        )
        if in_flight == "abort":
            assert completion.finish_reason == "abort"
            assert len(completion.token_ids) < 150
        else:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == 150
        [later] = await started(engine, Request(prompt(), GREEDY), seconds=0.3)
        assert not later.done()
        await asyncio.to_thread(engine.resume)
        assert (await later)[0].finish_reason == "length"

    run(work())


def test_an_abort_of_an_unknown_id_gives_nothing(engine: Engine) -> None:
    request = Request(prompt(), GREEDY)
    one(engine, request)
    assert engine.abort([request.id, "nobody"]) == []


def test_a_request_that_was_submitted_while_paused_is_aborted_by_an_update(
    engine: Engine, checkpoints: Checkpoints
) -> None:
    async def work() -> None:
        await asyncio.to_thread(engine.pause)
        [waits] = await started(engine, Request(prompt(), GREEDY), seconds=0.1)
        await asyncio.to_thread(engine.update_weights, checkpoints.a, 1, "abort")
        [completion] = await waits
        assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 0)
        await asyncio.to_thread(engine.resume)

    run(work())


def test_one_bad_request_refuses_the_batch_before_any_is_sent(engine: Engine) -> None:
    good = Request(prompt(), LONG)
    with pytest.raises(EngineError, match="the prompt is empty"):
        engine.generate([good, Request(())])
    assert engine.abort() == []  # nothing of the batch is in flight


def test_the_same_weights_again_change_no_bit(engine: Engine, checkpoints: Checkpoints) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    engine.update_weights(checkpoints.a, 1)
    after = one(engine, Request(prompt(), GREEDY))
    assert same(before, after)
    assert set(after.versions) == set(after.routes.versions) == {1}


def test_other_weights_are_those_of_a_fresh_engine(
    engine: Engine, checkpoints: Checkpoints, fresh_b: Completion
) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    engine.update_weights(checkpoints.b, 1)
    after = one(engine, Request(prompt(), GREEDY))
    assert same(after, fresh_b)
    assert not same(after, before)


def test_a_folder_without_weights_is_refused_and_nothing_is_aborted(engine: Engine, tmp_path: Any) -> None:
    async def work() -> None:
        [task] = await started(engine, Request(prompt(), GREEDY), seconds=0.02)
        with pytest.raises(EngineError, match=r"no \.safetensors file in"):
            await asyncio.to_thread(engine.update_weights, str(tmp_path), 1)
        assert (await task)[0].finish_reason == "length"
        assert engine.version == 0

    run(work())


@pytest.mark.parametrize("in_flight", ["abort", "wait"])
def test_a_swap_that_aborts_or_waits_leaves_one_version(
    engine: Engine, checkpoints: Checkpoints, in_flight: Any
) -> None:
    async def work() -> None:
        for requests in (12, 48, 192):  # more than run at once; on a slow machine all may end before the update comes
            tasks = await started(engine, *(Request(prompt(seed), LONG) for seed in range(requests)), seconds=0.1)
            update = asyncio.create_task(asyncio.to_thread(engine.update_weights, checkpoints.b, 1, in_flight))
            meanwhile = []
            while not update.done() and len(meanwhile) < 500:  # who comes later must not keep it waiting for ever
                meanwhile += await engine.submit(Request(prompt(), Sampling(2, 0.0, ignore_eos=True)))
            assert len(meanwhile) < 500
            await update
            landed = [completion for task in tasks for completion in await task]
            if in_flight == "wait" or landed[-1].finish_reason == "abort":
                break
            await asyncio.to_thread(engine.update_weights, checkpoints.a, 0)
        assert landed[-1].finish_reason == ("length" if in_flight == "wait" else "abort")
        for completion in landed:
            assert completion.finish_reason == "length" or in_flight == "abort"
            # no version, if it was aborted at once
            assert set(completion.versions) | set(completion.routes.versions) <= {0}
        for completion in meanwhile:  # before or after, never both
            assert len(set(completion.versions) | set(completion.routes.versions)) <= 1
        [after] = await engine.submit(Request(prompt(), GREEDY))
        assert set(after.versions) | set(after.routes.versions) == {1}

    run(work())


def test_a_swap_that_keeps_requests_says_which_version_sampled_each_token(
    engine: Engine, checkpoints: Checkpoints, trainer: Any, sampled: Sampled | None
) -> None:
    def swap() -> None:
        engine.update_weights(checkpoints.b, 1, "keep")

    def swap_back() -> None:
        engine.update_weights(checkpoints.a, 0)

    [[completion]] = run(midway(engine, [Request(prompt(), LONG)], swap, swap_back, ended_before, sampled))
    old = int((completion.versions == 0).sum())
    assert 0 < old < 150
    assert completion.finish_reason == "length"
    assert completion.versions.tolist() == [0] * old + [1] * (150 - old)
    # Row p - 1 computed the token at position p: both have one version.
    assert completion.routes.versions.tolist() == [0] * (PROMPT_TOKENS - 1 + old) + [1] * (150 - old)
    # The boundary is the true one: up to it A's trainer agrees, and with the first token after it no longer.
    gap = np.abs(trainer.logprobs(checkpoints.a, prompt(), completion) - completion.logprobs)
    # Rounding: of 9,000 tokens sampled and scored with one set of weights, two are more than 1e-4 apart, none 2e-4.
    assert gap[:old].max() < 1e-3 < gap[old : old + 3].max()
