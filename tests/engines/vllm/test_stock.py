"""Servers that are vLLM's own, without the plugin: what they capture is what vLLM in process captures, to the bit.

`completions` is started as a user would: no development mode, no --enable-scale-out. Its model has a hostile
generation_config.json, whose values must reach no request. `generate` is in development mode and has vLLM's route for
token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.vllm import http
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.versions import SECOND_RUNNER, installed_version, model_runner, numbers_of
from router_replay.errors import EngineError
from tests.engines import test_contract as contract
from tests.engines.conftest import (
    ENVIRONMENT,
    GREEDY,
    LONG,
    PROMPT_TOKENS,
    Checkpoints,
    Server,
    Servers,
    Trainer,
    dropped,
    metric,
    midway,
    not_aborted,
    one,
    prompt,
    running,
    same,
    start_command,
)
from tests.engines.stub import eventually
from tests.engines.vllm.record import (
    ROUTE_MUST_BE_ASKED_FOR,
    ROUTES,
    asked,
    file_of,
    record,
    refusal_of_generate,
    route_of,
    status_of,
)
from tests.makers import random_routes
from tests.verify.by_url import check_verdicts

# These change every sample, and every log-prob after the first token, where they reach a request.
GENERATION_CONFIG = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 5.0, "temperature": 0.01}
LIMIT = 170  # tokens; vLLM applies a max_new_tokens that is set for the server to every request


@pytest.fixture(scope="module")
def completions_server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tmp_path_factory.mktemp("stock")
    model = folder / "model"
    model.mkdir()
    for file in pathlib.Path(checkpoints.a).iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **GENERATION_CONFIG}))
    override = json.dumps({"max_new_tokens": LIMIT})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--enable-return-routed-experts", "--override-generation-config", override]
    variables = {**os.environ, **ENVIRONMENT, **model_runner(installed_version()), "ROUTER_REPLAY_VLLM": "0"}
    server = start_command(command, folder / "log", variables)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def completions(completions_server: Server) -> Iterator[Engine]:
    hidden: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if numbers_of(installed_version()) < ROUTE_MUST_BE_ASKED_FOR:  # as behind a proxy that passes /v1 only
        hidden = unittest.mock.patch.object(http, "GENERATE", "/hidden")
    with hidden, completions_server.wait(lambda: VllmHttpEngine(completions_server.url), 600) as engine:
        yield engine


@pytest.fixture(scope="module")
def generate(servers: Servers) -> Iterator[Engine]:
    with servers.plain.wait(lambda: VllmHttpEngine(servers.plain.url), 600) as engine:
        yield engine


@pytest.fixture(params=["completions", "generate"])
def stock(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine: Engine = request.getfixturevalue(request.param)
    yield engine
    engine.abort()
    engine.resume()


def test_what_each_server_can_do(completions: Engine, generate: Engine) -> None:
    for engine in (completions, generate):
        can = engine.capabilities
        assert (can.routes, can.start, can.forced_routes, can.versions) == (True, True, False, False)
        assert "forced routes, new weights and policy versions need the plugin" in can.why_not
    assert "not in development mode" in completions.capabilities.why_not
    assert "an abort returns nothing" in completions.capabilities.why_not
    assert "a pause cannot keep requests" in completions.capabilities.why_not
    assert "plugin is not active" in generate.capabilities.why_not
    assert "abort" not in generate.capabilities.why_not
    assert "pause" not in generate.capabilities.why_not


def test_a_refused_generate_route_is_not_used(completions: Engine, completions_server: Server) -> None:
    """vLLM 0.32 says 403 without --enable-scale-out, as a server does that wants another key."""
    if numbers_of(installed_version()) < ROUTE_MUST_BE_ASKED_FOR:
        pytest.skip("every server of this vLLM has the route for token ids")
    status = status_of(completions_server.url + http.GENERATE, {})
    assert status == refusal_of_generate(installed_version())
    asked_before = answered(completions_server, "/v1/completions")
    assert one(completions, Request(prompt(), GREEDY)).routes.all_captured
    assert answered(completions_server, "/v1/completions") == asked_before + 1


@pytest.mark.parametrize(
    "promise",
    [
        contract.test_every_token_but_the_last_has_a_row,
        contract.test_the_same_request_gives_the_same_answer_alone_and_in_a_batch,
        contract.test_each_of_n_samples_has_its_own_rows,
        contract.test_generation_stops_at_the_end_of_sequence_and_at_stop_tokens,
        contract.test_an_abort_of_an_unknown_id_gives_nothing,
        contract.test_one_bad_request_refuses_the_batch_before_any_is_sent,
        contract.test_abort_before_the_first_token_gives_an_empty_completion,
    ],
    ids=lambda promise: promise.__name__.removeprefix("test_"),
)
def test_the_capture_part_of_the_contract(stock: Engine, promise: Callable[[Engine], None]) -> None:
    promise(stock)


@pytest.mark.parametrize("start", [0, 1, 33, PROMPT_TOKENS - 1])
def test_rows_before_the_start_are_left_out(stock: Engine, start: int) -> None:
    contract.test_rows_before_the_start_are_left_out(stock, start)


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt(), GREEDY),
        Request(prompt(1), Sampling(40, 0.0, stop_token_ids=(84,)), start=33),
        Request(prompt(2, 40), Sampling(60, ignore_eos=True, seed=5)),
        Request(prompt(3, 40), Sampling(12, n=3, seed=2**40, ignore_eos=True)),
        Request(prompt(4, 40), Sampling(30, top_p=0.8, seed=1), start=39),
    ],
    ids=["greedy", "stop", "seeded", "three", "top_p"],
)
def test_an_answer_equals_that_of_vllm_in_process(stock: Engine, vllm_engine: Engine, request_: Request) -> None:
    """Seeded prompts are short: on a CPU, a server without the plugin dies of a seed with chunked prefill."""
    here, there = vllm_engine.generate([request_]), stock.generate([request_])
    assert len(here) == len(there) == request_.sampling.n
    for a, b in zip(here, there, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert (a.finish_reason, a.start, a.index) == (b.finish_reason, b.start, b.index)
        if request_.sampling.n == 1:
            assert np.array_equal(a.routes.ids, b.routes.ids)
        else:  # the samples of one request meet in other batches, and rounding differs
            assert (a.routes.sorted().ids == b.routes.sorted().ids).mean() > 0.99
            assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
        if request_.sampling.n == request_.sampling.top_p == 1:  # the log-probs mode decides on those of a top-p cut
            assert np.array_equal(a.logprobs, b.logprobs)


def test_samples_that_end_at_different_times_all_come(stock: Engine) -> None:
    """Up to 0.28, vLLM's own default is an answer with the samples that ended last."""
    stops = tuple(range(3, 128, 8))
    samples = stock.generate([Request(prompt(6, 40), Sampling(60, n=6, seed=4, stop_token_ids=stops))])
    assert [sample.index for sample in samples] == list(range(6))
    assert len({len(sample.token_ids) for sample in samples}) > 1


def test_a_trainer_that_replays_the_rows_finds_the_servers_log_probs(
    stock: Engine, checkpoints: Checkpoints, trainer: Trainer
) -> None:
    requests = [Request(prompt(seed), GREEDY) for seed in range(4)]
    for request, completion in zip(requests, stock.generate(requests), strict=True):
        assert trainer.gap(checkpoints.a, request.token_ids, completion, completion.routes).max() < 1e-4


def test_a_generation_config_reaches_no_request(completions: Engine, completions_server: Server) -> None:
    """It does reach a request that leaves these fields out, so the tests above mean something."""
    body = {"prompt": list(prompt(5, 20)), "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
    url = f"{completions_server.url}/v1/completions"
    plain = {tuple(asked(url, body | {"seed": seed})["choices"][0]["token_ids"]) for seed in range(4)}
    assert len(plain) == 1
    ours = [one(completions, Request(prompt(5, 20), Sampling(8, seed=seed, ignore_eos=True))) for seed in range(4)]
    assert len({tuple(sample.token_ids.tolist()) for sample in ours}) == 4


def test_a_limit_of_the_server_is_an_error_and_the_models_own_is_not(completions: Engine) -> None:
    with pytest.raises(EngineError, match=f"asked for up to 200 tokens, and the server ended the sample at {LIMIT}"):
        one(completions, Request(prompt(0, 10), Sampling(200, ignore_eos=True)))
    whole = one(completions, Request(prompt(0, 100), Sampling(200, ignore_eos=True)))
    assert (len(whole.token_ids), whole.finish_reason) == (156, "length")


def test_what_needs_the_plugin_is_refused_with_the_reason(stock: Engine, checkpoints: Checkpoints) -> None:
    with pytest.raises(EngineError, match="need the plugin"):
        one(stock, Request(prompt(), GREEDY, forced_routes=random_routes(3, stock.spec)))
    why = r"computes on a CPU.*wrong experts|does not say on which device"  # in development mode, and else
    with pytest.raises(EngineError, match=rf"need the plugin.*({why})"):
        stock.update_weights(checkpoints.b, 1)
    assert stock.version == 0


def test_other_temperatures_need_a_server_that_says_what_its_log_probs_are(
    completions: Engine, generate: Engine
) -> None:
    request = Request(prompt(0, 20), Sampling(4, temperature=0.7, seed=3, ignore_eos=True))
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        one(completions, request)
    assert len(one(generate, request).token_ids) == 4


@pytest.mark.parametrize("route", ROUTES)
def test_the_recorded_answer_is_still_what_comes(
    route: str, completions: Engine, generate: Engine, completions_server: Server, servers: Servers
) -> None:
    """Of the installed version, where it is recorded: the same fields, and the same tokens."""
    server = completions_server if route == "completions" else servers.plain
    if os.environ.get("VLLM_RECORD"):
        record(route, server.url)
    version = installed_version().partition("+")[0]
    file = file_of(route, version)
    if not file.exists():
        pytest.skip(f"no answer of vLLM {version} is recorded")
    told = json.loads(file.read_text())
    came, kept = asked(server.url + route_of(route, version).path, told["request"]), told["answer"]
    assert set(came) == set(kept)
    assert [set(choice) for choice in came["choices"]] == [set(choice) for choice in kept["choices"]]
    assert [choice["token_ids"] for choice in came["choices"]] == [choice["token_ids"] for choice in kept["choices"]]


# -- abort and pause ----------------------------------------------------------------------------------


def test_an_abort_drops_the_request_on_a_server_that_has_no_call_for_it(
    completions: Engine, completions_server: Server
) -> None:
    before = one(completions, Request(prompt(), GREEDY))
    requests = [Request(prompt(seed), LONG) for seed in range(2)]
    landed = asyncio.run(dropped(completions, completions_server, requests))
    assert [(one.finish_reason, len(one.token_ids), len(one.routes)) for [one] in landed] == [("abort", 0, 0)] * 2
    eventually(lambda: running(completions_server) == 0)
    assert same(before, one(completions, Request(prompt(), GREEDY)))


def test_an_abort_in_development_mode_returns_what_was_sampled(generate: Engine) -> None:
    greedy = Request(prompt(), Sampling(150, 0.0, ignore_eos=True))
    whole = one(generate, greedy)
    aborted: list[Completion] = []
    [[part]] = asyncio.run(midway(generate, [greedy], lambda: aborted.extend(generate.abort()), too_late=not_aborted))
    assert aborted[-1] is part
    tokens = len(part.token_ids)
    assert part.finish_reason == "abort"
    assert np.array_equal(part.token_ids, whole.token_ids[:tokens])
    assert part.routes.same_sets(whole.routes[: PROMPT_TOKENS + tokens - 1])


@pytest.mark.parametrize("in_flight", ["abort", "wait"])
def test_a_pause_in_development_mode(generate: Engine, in_flight: Any) -> None:
    try:
        contract.test_a_pause_ends_or_waits_for_its_requests_as_asked(generate, None, in_flight)
        contract.test_a_paused_engine_keeps_its_requests(generate)
    finally:
        generate.resume()  # a server that stays paused would hold the requests of all later tests


def test_a_server_without_a_pause_waits_and_aborts(completions: Engine) -> None:
    async def work() -> None:
        task = asyncio.create_task(completions.submit(Request(prompt(), LONG)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="a pause cannot keep requests"):
            await asyncio.to_thread(completions.pause, "keep")
        await asyncio.to_thread(completions.pause, "wait")
        assert (await task)[0].finish_reason == "length"
        later = asyncio.create_task(completions.submit(Request(prompt(), GREEDY)))
        await asyncio.sleep(0.3)
        assert not later.done()
        await asyncio.to_thread(completions.resume)
        assert len((await later)[0].token_ids) == 20

    asyncio.run(work())


def test_verify_finds_the_checkpoint_of_a_server(
    stock: Engine,
    request: pytest.FixtureRequest,
    servers: Servers,
    checkpoints: Checkpoints,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its eight prompts at once are more than a step of these servers takes, which a seed would end."""
    by_generate = request.node.callspec.params["stock"] == "generate"
    server: Server = servers.plain if by_generate else request.getfixturevalue("completions_server")
    check_verdicts(capsys, server.url, checkpoints.a, checkpoints.b)


# -- the end of a server, so this comes last ----------------------------------------------------------


def test_a_server_that_is_killed_in_the_middle_of_a_batch(generate: Engine, servers: Servers) -> None:
    longest = Sampling(max_tokens=230, ignore_eos=True)

    async def work() -> list[Any]:
        tasks = [asyncio.create_task(generate.submit(Request(prompt(seed, 20), longest))) for seed in range(6)]
        while not await asyncio.to_thread(running, servers.plain):
            await asyncio.sleep(0)
        servers.plain.kill()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(work())
    assert len(results) == 6
    assert all(isinstance(result, EngineError) for result in results), results
    with pytest.raises(EngineError, match=r"no vLLM server at .* after 5 attempts"):
        generate.generate([Request(prompt(), GREEDY)])


def test_a_server_that_ends_at_a_seed_on_a_cpu_has_the_reason_in_the_error(
    completions: Engine, completions_server: Server
) -> None:
    if numbers_of(installed_version()) >= SECOND_RUNNER:
        pytest.skip("the second model runner has no generators to rewind")
    with pytest.raises(EngineError, match=r"answered 500.*CPU Generator does not use offset.*leave out the seed"):
        one(completions, Request(prompt(), Sampling(max_tokens=4, seed=1)))
    assert "RuntimeError: CPU Generator does not use offset" in completions_server.log.read_text()


def answered(server: Server, path: str) -> float:
    """How many requests to a path were answered with a success."""
    return sum(metric(server, f'http_requests_total{{handler="{path}",method="POST",status="2xx"}}'))
