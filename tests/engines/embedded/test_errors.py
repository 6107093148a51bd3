"""How the embedded engine fails, aborts, pauses and closes, and what it refuses, without harm to other requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from router_replay import RouterReplay
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.embedded import samples as embedded_samples
from router_replay.errors import EngineError
from tests.engines.conftest import GREEDY, VOCABULARY, one, prompt, same
from tests.engines.embedded.gate import SEEDED, Gate, in_thread, landed
from tests.replay.tiny import make


def test_an_error_in_a_pass_fails_its_requests_and_no_others(engine: EmbeddedEngine, model_a: Any) -> None:
    before = one(engine, Request(prompt(), SEEDED))

    def fails(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["past_key_values"].get_seq_length() >= len(prompt()) + 3:
            raise RuntimeError("a fuse blew")

    hook = model_a.register_forward_pre_hook(fails, with_kwargs=True)
    results = [in_thread(lambda seed=seed: one(engine, Request(prompt(seed), SEEDED))) for seed in range(2)]
    for result in results:
        with pytest.raises(EngineError, match="the model failed in a pass: RuntimeError: a fuse blew"):
            landed(result)
    hook.remove()
    assert same(one(engine, Request(prompt(), SEEDED)), before)


def test_logits_that_are_no_numbers_fail_the_request(engine: EmbeddedEngine, model_a: Any) -> None:
    before = one(engine, Request(prompt(), SEEDED))
    spoiled = {name: tensor.clone() for name, tensor in model_a.state_dict().items()}
    good = {name: tensor.clone() for name, tensor in spoiled.items()}
    spoiled["model.embed_tokens.weight"][120] = float("nan")
    engine.update_weights(spoiled, 4)
    clean = tuple(token % 100 for token in prompt())
    bad = in_thread(lambda: one(engine, Request((*clean[:-1], 120), SEEDED)))
    fine = in_thread(lambda: one(engine, Request(clean, Sampling(2, 0.0, ignore_eos=True))))
    with pytest.raises(EngineError, match="logits of position 70 are not finite"):
        landed(bad)
    assert np.isfinite(landed(fine).logprobs).all()
    engine.update_weights(good, 5)
    assert same(one(engine, Request(prompt(), SEEDED)), before)


def test_an_abort_passes_over_who_is_through_or_unknown(engine: EmbeddedEngine) -> None:
    request = Request(prompt(), GREEDY)
    one(engine, request)
    assert engine.abort([request.id, "nobody"]) == []


def test_who_stops_waiting_frees_its_place(engine: EmbeddedEngine) -> None:
    async def work() -> None:
        task = asyncio.create_task(engine.submit(Request(prompt(), Sampling(400, ignore_eos=True))))
        while not engine._schedule._runner.samples:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    schedule = engine._schedule
    engine._post(lambda: None).result()  # the turn that runs this ends with a look at who is not waited for
    assert engine._post(lambda: (list(schedule._flights), schedule._runner.samples)).result() == ([], [])


def test_a_pause_waits_for_those_in_flight_and_holds_those_after(engine: EmbeddedEngine) -> None:
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    pause, late = gate.then(lambda: engine.pause("wait"), lambda: one(engine, Request(prompt(1), GREEDY)))
    landed(pause)
    assert landed(running).finish_reason == "length"
    with pytest.raises(EngineError, match="a paused engine finishes no request"):
        engine.pause("wait")
    assert not late.done()
    engine.resume()
    assert landed(late).finish_reason == "length"


def test_a_closed_engine_answers_nobody_and_leaves_the_model(model_a: Any) -> None:
    engine = EmbeddedEngine(model_a)
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    [closing] = gate.then(lambda: (gate.opened.set(), engine.close()))
    landed(closing)
    with pytest.raises(EngineError, match="this engine was closed"):
        landed(running)
    assert not engine._thread.is_alive()
    for call in (engine.abort, engine.pause, lambda: one(engine, Request(prompt()))):
        with pytest.raises(EngineError, match="this engine was closed"):
            call()
    engine.close()
    RouterReplay(model_a).detach()  # would refuse routers that still belong to another


def test_the_length_of_the_model_is_the_end(model_a: Any) -> None:
    with EmbeddedEngine(model_a, max_length=75) as engine:
        completion = one(engine, Request(prompt(), GREEDY))
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
        with pytest.raises(EngineError, match="the prompt has 80 tokens, expected at most 74"):
            one(engine, Request(prompt(0, 80)))


def test_a_bad_request_is_refused_before_any_of_its_batch_joins(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Request((VOCABULARY,), GREEDY)
    posted: list[object] = []
    monkeypatch.setattr(engine, "_post", posted.append)
    with pytest.raises(EngineError, match=rf"{bad.id}: the prompt: token ids must lie in"):
        engine.generate([Request(prompt(), GREEDY), bad])
    assert not posted


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((5, VOCABULARY)), r"token ids must lie in \[0, 128\), got 128 at position 1"),
        (Request((5,), Sampling(temperature=-1.0)), "temperature must be at least 0"),
        (Request((5,), Sampling(top_p=0.0)), "top_p must lie in"),
    ],
)
def test_what_would_break_a_pass_is_refused_before(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        one(engine, request_)


def test_models_that_do_not_generate_are_refused() -> None:
    for family in ("switch_transformers", "qwen3_vl_moe"):
        with pytest.raises(EngineError, match="cannot generate: expected a decoder-only model"):
            EmbeddedEngine(make(family).model)


@pytest.mark.parametrize(
    "request_",
    [
        Request((5.9, 6.2)),  # type: ignore[arg-type]
        Request((5, 6), start=1.0),  # type: ignore[arg-type]
        Request((5, 6), Sampling(max_tokens="3")),  # type: ignore[arg-type]
        Request((5, 6), Sampling(n=1 << 40)),
        Request((5, 6), Sampling(seed=-1)),
        Request((5, 6), Sampling(temperature="hot")),  # type: ignore[arg-type]
        Request((5, 6), id=["x"]),  # type: ignore[arg-type]
    ],
)
def test_a_bad_request_costs_nobody_else_anything(engine: EmbeddedEngine, request_: Request) -> None:
    before = one(engine, Request(prompt(), SEEDED))
    for _ in range(2):
        with pytest.raises(EngineError):
            one(engine, request_)
    assert same(one(engine, Request(prompt(), SEEDED)), before)


def test_a_request_whose_answer_cannot_be_made_fails_alone(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = embedded_samples.Sample.completion

    def fails(sample: Any, spec: Any) -> Any:
        if sample.flight.request.id == "bad":
            raise IndexError("no such row")
        return original(sample, spec)

    monkeypatch.setattr(embedded_samples.Sample, "completion", fails)
    bad = in_thread(lambda: one(engine, Request(prompt(), SEEDED, id="bad")))
    good = in_thread(lambda: one(engine, Request(prompt(1), SEEDED)))
    with pytest.raises(EngineError, match="bad: building the answer failed: IndexError: no such row"):
        landed(bad)
    assert landed(good).finish_reason == "length"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit("a hook")])
def test_whatever_ends_the_thread_is_told_to_all_who_wait_and_all_who_come(
    model_a: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = EmbeddedEngine(model_a)
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), SEEDED)))

    def fails() -> None:
        raise error

    def then() -> None:
        monkeypatch.setattr(engine._schedule, "pass_barriers", fails)

    [_, pausing] = gate.then(then, engine.pause)
    for waiting in (running, pausing):
        with pytest.raises(EngineError, match=f"the engine's thread died: {type(error).__name__}: a"):
            landed(waiting)
    for call in (lambda: one(engine, Request(prompt())), engine.abort, engine.resume):
        with pytest.raises(EngineError, match="the engine's thread died"):
            call()
    engine.close()
    RouterReplay(model_a).detach()


def test_two_requests_of_one_id_are_not_in_flight_together(engine: EmbeddedEngine) -> None:
    twin = Request(prompt(), SEEDED, id="twin")
    with pytest.raises(EngineError, match="twin: 2 requests of one batch have this id"):
        engine.generate([twin, twin])
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, twin))
    [second] = gate.then(lambda: one(engine, twin))
    with pytest.raises(EngineError, match="twin: another request with this id is in flight"):
        landed(second)
    first = landed(running)
    assert same(one(engine, twin), first)  # one after the other they are welcome


def test_versions_and_choices_that_cannot_be_are_refused(engine: EmbeddedEngine, model_a: Any) -> None:
    for version in (-1, 1.0, True, "1"):
        with pytest.raises(EngineError, match="a policy version must"):
            engine.update_weights(model_a, version)  # type: ignore[arg-type]
    engine.update_weights(model_a, np.uint64(engine.version))  # type: ignore[arg-type]
    assert type(engine.version) is int
    with pytest.raises(EngineError, match="in_flight must be one of"):
        engine.pause("drop")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="abort takes a list"):
        engine.abort("request-1")
