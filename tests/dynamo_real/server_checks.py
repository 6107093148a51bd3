"""What DynamoEngine promises beyond the contract, on real Dynamos; run by `make test-dynamo`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.dynamo.completions import completions_body
from router_replay.engines.dynamo.transport import request_id
from router_replay.engines.vllm.requests import sampling_arguments
from router_replay.errors import EngineError
from router_replay.routes import Routes
from tests.dynamo_real.conftest import SPEC, connect
from tests.dynamo_real.processes import Dynamo, call
from tests.engines.conftest import (
    GREEDY,
    LONG,
    PROMPT_TOKENS,
    Checkpoints,
    Sampled,
    midway,
    not_aborted,
    one,
    prompt,
    same,
    until_sampled,
)
from tests.engines.dynamo import server as payloads
from tests.gateway.two_turns import rows_fit_their_tokens
from tests.verify.by_url import check_verdicts

Say = Callable[[str], None]
ROUTES = ("generate", "completions")
LOST = "loses the rows of an answer"


def test_what_was_found_out(engines: dict[str, Any], verified: Say) -> None:
    whole, part = (engines[name].capabilities for name in ROUTES)
    assert (whole.routes, whole.forced_routes, whole.start, whole.versions, whole.why_not) == (True,) * 4 + ("",)
    assert (part.routes, part.forced_routes, part.start, part.versions) == (True, False, False, True)
    assert "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1" in part.why_not
    assert engines["generate"].spec == SPEC
    assert engines["generate"].report()["rules"]
    verified("plugin, spec, log-probs mode and routes are found out when connecting, with reasons for what is missing")


def test_answers_are_those_of_vllm_in_one_process(engine: Engine, in_process: list[Completion], verified: Say) -> None:
    for seed, reference in enumerate(in_process):
        assert same(one(engine, Request(prompt(seed), GREEDY)), reference)
    verified(f"{len(in_process)} greedy requests: tokens, log-probs and rows equal to vLLM in one process, to the bit")


def test_no_answer_loses_its_rows_under_load(engine: Engine, verified: Say) -> None:
    """vLLM 0.30 loses some when Dynamo reads two parts as one; the plugin keeps them."""

    async def all_at_once() -> list[list[Completion]]:
        sampling = Sampling(max_tokens=24, ignore_eos=True)
        return await asyncio.gather(*(engine.submit(Request(prompt(seed, 12), sampling)) for seed in range(96)))

    landed = asyncio.run(all_at_once())
    assert all(completion.routes.all_captured for [completion] in landed)
    verified("96 requests at once: every answer has all its rows")


def test_defaults_of_the_model_do_not_leak_in(engine: Engine, verified: Say) -> None:
    """The checkpoints' generation_config.json says top_k 1 and a repetition penalty."""
    samples = engine.generate([Request(prompt(), Sampling(max_tokens=8, n=4, ignore_eos=True))])
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 4
    repeats = one(engine, Request((7,) * 30, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)))
    assert (repeats.logprobs > -20).all()
    verified("top_k, min_p, repetition_penalty and temperature of generation_config.json change no sample")


def test_an_aborted_rollout_goes_on_with_its_own_routes(
    engines: dict[str, Engine], sampled: Sampled, verified: Say
) -> None:
    engine = engines["generate"]
    request = Request(prompt(3), LONG)
    [[partial]] = asyncio.run(
        midway(engine, [request], lambda: engine.abort([request.id]), too_late=not_aborted, sampled=sampled)
    )
    assert partial.finish_reason == "abort"
    known = PROMPT_TOKENS + len(partial.token_ids)
    forced = Routes.concat([partial.routes, Routes.missing(1, engine.spec)])
    tokens = (*request.token_ids, *partial.token_ids.tolist())
    rest = one(engine, Request(tokens, Sampling(8, 0.0, ignore_eos=True), start=known - 1, forced_routes=forced))
    assert (rest.start, len(rest.routes)) == (known - 1, 8)
    verified(
        f"aborted after {len(partial.token_ids)} tokens, resumed under its recorded routes from row {known - 1} on"
    )


def test_an_abort_by_somebody_else_is_an_abort(engine: Engine, dynamo: Dynamo, verified: Say) -> None:
    """Dynamo says "stop" (completions) or drops the tokens (generate, status 499)."""

    async def work() -> Completion:
        before = dynamo.sampled()
        task = asyncio.create_task(engine.submit(Request(prompt(4), LONG)))
        await until_sampled(dynamo.sampled, before + 6, [task])
        while not task.done():  # Dynamo says ok to an abort that reached no request
            for flight in list(engine._flights):  # type: ignore[attr-defined]
                body = {"request_id": request_id(flight.name)}
                await asyncio.to_thread(call, f"{dynamo.workers[0].url}/engine/abort_request", body)
            await asyncio.wait([task], timeout=0.2)
        [completion] = await task
        return completion

    completion = asyncio.run(work())
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 150
    verified(f"aborted by another client: finish_reason 'abort' with {len(completion.token_ids)} tokens")


def test_stop_tokens(engines: dict[str, Engine], verified: Say) -> None:
    engine = engines["completions"]
    free = one(engine, Request(prompt(), GREEDY))
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    stopped = one(engine, Request(prompt(), Sampling(20, 0.0, stop_token_ids=(stop,))))
    if 1 not in free.token_ids[:first]:
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
        assert len(stopped.routes) == PROMPT_TOKENS + first
    sampled = engine.generate([Request(prompt(seed), Sampling(max_tokens=150, n=4)) for seed in range(3)])
    ended = [sample for sample in sampled if sample.token_ids[-1] == 1]  # the 150th token may be it, too
    assert ended
    assert all(sample.finish_reason == "stop" for sample in ended)
    others = [sample for sample in sampled if sample.token_ids[-1] != 1]
    assert all((sample.finish_reason, len(sample.token_ids)) == ("length", 150) for sample in others)
    verified("completions: ends at stop tokens and at the end of the sequence, told from aborts by the last token")


def test_weights_from_shared_memory(engine: Engine, checkpoints: Checkpoints, verified: Say) -> None:
    from safetensors.torch import load_file

    from router_replay.engines.vllm.weights import share

    before = one(engine, Request(prompt(), GREEDY))
    with share(load_file(pathlib.Path(checkpoints.a) / "model.safetensors")) as weights:
        engine.update_weights(weights, 1)
    after = one(engine, Request(prompt(), GREEDY))
    assert same(before, after)
    assert set(after.versions) == {1}
    verified("weights from shared memory: A -> A changes no bit")


def test_weights_that_are_not_there_are_refused(engine: Engine, verified: Say) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    with pytest.raises(EngineError, match="/nowhere"):
        engine.update_weights("/nowhere", version=1)
    assert same(one(engine, Request(prompt(), GREEDY)), before)
    verified("a missing folder is refused before anything is aborted, and the worker goes on")


TRAIN = """
replay = "r3"
steps = 2
output = "{output}"
[model]
path = "{model}"
[engine]
kind = "dynamo"
url = "{url}"
workers = ["{worker}"]
model = "moe"
dtype = "float32"
max_length = 200
[environment]
kind = "jsonl"
file = "{problems}"
reward = "tests.dynamo_real.rewards:even_tokens"
[rollout]
prompts = 2
group = 4
max_tokens = 8
[trainer]
max_tokens = 256
[optimizer]
lr = 1e-4
[logging]
tensorboard = false
"""


def test_training(
    engines: dict[str, Engine], dynamo: Dynamo, checkpoints: Checkpoints, tmp_path: pathlib.Path, verified: Say
) -> None:
    problems = tmp_path / "problems.jsonl"
    lines = [json.dumps({"prompt": f"t{number + 5} t{number + 9} t7", "answer": ""}) for number in range(8)]
    problems.write_text("\n".join(lines))
    config = tmp_path / "dynamo.toml"
    config.write_text(
        TRAIN.format(
            output=tmp_path / "run",
            model=checkpoints.a,
            url=dynamo.frontends["generate"].url,
            worker=dynamo.workers[0].url,
            problems=problems,
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "router_replay.cli", "train", str(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=600,
    )
    engines["generate"].update_weights(checkpoints.a, 0)  # the trainer left its own
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in metrics if "routes/replayed" in step]
    assert len(steps) == 2
    assert all(step["routes/replayed"] > 0 and step["routes/live"] == 0 for step in steps)
    gaps = [step["mismatch/k3"] for step in steps]
    assert max(gaps) < 1e-6  # of the second step too, which the engine sampled under new weights
    verified(
        f"router-replay train, engine.kind = dynamo: 2 steps, all rows replayed, k3 {gaps[0]:.1e} and {gaps[1]:.1e}"
    )


def test_the_recorded_payloads_are_still_what_comes(engines: dict[str, Engine], dynamo: Dynamo, verified: Say) -> None:
    """DYNAMO_RECORD=1 writes them anew, for when Dynamo changes. Names and times are not part of the contract."""
    request = Request(payloads.PROMPT, Sampling(3, 0.0, ignore_eos=True))
    sampling = sampling_arguments(request, (), as_text=True)
    url = {name: frontend.url for name, frontend in dynamo.frontends.items()}
    came = {
        "completions": call(
            url["completions"] + payloads.COMPLETIONS,
            completions_body(request, 0, "moe", "", prompt_start=False),
        ),
        "generate": call(
            url["generate"] + payloads.GENERATE,
            {"model": "moe", "token_ids": list(payloads.PROMPT), "sampling_params": sampling},
        ),
        "report": call(dynamo.workers[0].url + payloads.PLUGIN, {"method": "router_replay_report"}),
    }
    for name, (status, body) in came.items():
        assert status == 200
        file = payloads.PAYLOADS / f"{name}.json"
        if name == "report":
            [body] = body["results"]
            body = {**body, "seams": [], "weights": {}}  # they have tests of their own
        else:
            body |= dict.fromkeys(body.keys() & {"id", "created", "request_id"}, 0)
        if os.environ.get("DYNAMO_RECORD") == "1":
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(body, indent=1) + "\n")
        assert shape_of(json.loads(file.read_text())) == shape_of(body)
    body = completions_body(request, 0, "moe", "", prompt_start=True)
    status, body = call(url["completions"] + payloads.COMPLETIONS, body)
    assert (status, "unknown field `routed_experts_prompt_start`" in body["message"]) == (400, True)
    assert call(url["completions"] + payloads.GENERATE, {})[0] == payloads.NO_ROUTE.status
    assert call(dynamo.workers[0].url + "/engine/nothing", {})[0] == payloads.NO_PLUGIN.status
    verified("the answers that tests/engines/dynamo uses are those of this Dynamo")


def shape_of(value: Any) -> Any:
    """The names of all fields, and the types of all values."""
    if isinstance(value, dict):
        return {
            name: shape_of(one) for name, one in value.items() if name not in ("rules", "text_offset", "top_logprobs")
        }
    return [shape_of(one) for one in value] if isinstance(value, list) else type(value).__name__


def test_verify_finds_the_checkpoint_of_the_worker(
    engine: Engine,  # so that the worker is on checkpoint A
    request: pytest.FixtureRequest,
    dynamo: Dynamo,
    checkpoints: Checkpoints,
    capsys: pytest.CaptureFixture[str],
    verified: Say,
) -> None:
    route = request.node.callspec.params["engine"]
    check_verdicts(capsys, f"dynamo={dynamo.frontends[route].url}", checkpoints.a, checkpoints.b)
    verified(f"verify by {route}: no fault on the right checkpoint, and another one is named")


# -- a Dynamo without our plugin ----------------------------------------------------------------------


@pytest.fixture(params=ROUTES)
def plain_engine(request: pytest.FixtureRequest, plain: Dynamo) -> Any:
    with connect(plain, request.param, spec=SPEC, end_of_sequence=[1]) as engine:
        yield engine


def test_without_the_plugin_it_captures(plain_engine: Engine, in_process: list[Completion], verified: Say) -> None:
    can = plain_engine.capabilities
    assert (can.routes, can.forced_routes, can.versions) == (True, False, False)
    assert "ROUTER_REPLAY_VLLM=1" in can.why_not
    equal = 0
    for seed, reference in enumerate(in_process):
        try:
            equal += same(one(plain_engine, Request(prompt(seed), GREEDY)), reference)
        except EngineError as error:
            equal += LOST in str(error)  # the bug that the plugin repairs
    assert equal == len(in_process)
    verified("no plugin: answers equal to vLLM in one process, or refused because vLLM lost their rows")


def test_without_the_plugin_it_refuses_what_would_be_wrong(
    plain: Dynamo, plain_engine: Engine, checkpoints: Checkpoints, verified: Say
) -> None:
    with pytest.raises(EngineError, match=r"loads wrong experts on a CPU.*gpu_workers=True"):
        plain_engine.update_weights(checkpoints.b, version=1)
    with pytest.raises(EngineError, match=r"temperature 0\.5.*--enable-rl"):
        one(plain_engine, Request(prompt(), Sampling(temperature=0.5)))
    with pytest.raises(EngineError, match="pass spec="):
        connect(plain, "generate")
    with connect(plain, "completions", spec=SPEC) as engine, pytest.raises(EngineError, match="end_of_sequence="):
        one(engine, Request(prompt(), Sampling()))
    verified("no plugin: weights, temperatures without --enable-rl and unknown ends are refused with the reason")


def test_without_the_plugin_an_abort_ends_requests(plain: Dynamo, plain_engine: Engine, verified: Say) -> None:
    async def work() -> Completion:
        requests = [Request(prompt(seed), LONG) for seed in range(16)]  # more than run at once: the last cannot end
        tasks = await _running(plain, plain_engine, requests)
        await asyncio.to_thread(plain_engine.abort, [request.id for request in requests])
        [completion] = (await asyncio.gather(*tasks))[-1]
        return completion

    completion = asyncio.run(work())
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 150
    verified(f"no plugin: an abort ends the request; {len(completion.token_ids)} tokens came back")


def _with_rows(engine: Engine, request: Request) -> Completion:
    """The answer to a request, which is sent again where vLLM lost its rows: without the plugin nothing repairs it."""
    for _ in range(20):
        try:
            return one(engine, request)
        except EngineError as error:
            if LOST not in str(error):
                raise
    raise AssertionError("vLLM lost the rows of 20 answers, one after the other")


async def _running(plain: Dynamo, engine: Engine, requests: list[Request]) -> list[asyncio.Task[list[Completion]]]:
    """Submit requests, and return when the workers have sampled some tokens."""
    before = plain.sampled()
    tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
    await until_sampled(plain.sampled, before + 32, tasks)
    return tasks


def test_the_reason_of_the_refusal_is_true(plain: Dynamo, checkpoints: Checkpoints, verified: Say) -> None:
    """vLLM's own reload of the same weights on a CPU says ok, and the answers are other ones."""
    with connect(plain, "generate", spec=SPEC, gpu_workers=True) as engine:
        before = _with_rows(engine, Request(prompt(6), GREEDY))
        engine.update_weights(checkpoints.a, version=1)
        after = _with_rows(engine, Request(prompt(6), GREEDY))
        assert not same(before, after)
        with pytest.raises(EngineError, match="would mix two policies"):
            asyncio.run(_kept(plain, engine, checkpoints))
    verified("vLLM's own reload on a CPU: A -> A says ok and changes the answers, as the refusal says")


async def _kept(plain: Dynamo, engine: Engine, checkpoints: Checkpoints) -> None:
    tasks = await _running(plain, engine, [Request(prompt(seed), LONG) for seed in range(16)])
    try:
        await asyncio.to_thread(engine.update_weights, checkpoints.a, 2, "keep")
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)  # vLLM may lose rows of theirs


def test_a_worker_is_killed(plain: Dynamo, verified: Say) -> None:
    """The last test of this Dynamo: of its two workers, one dies in the middle of requests."""
    landed: dict[str, list[Completion | EngineError]] = {name: [] for name in plain.frontends}
    # Small enough that all requests of a worker run at once, six of them: each has tokens when the worker is killed.
    tokens, sampling = 12, Sampling(max_tokens=116, ignore_eos=True)

    killed = threading.Event()

    def ask(name: str, engine: Engine, seed: int) -> None:
        """Have one request after the other in flight, so that the worker dies in the middle of some."""
        for turn in itertools.count():
            try:
                landed[name].append(one(engine, Request(prompt(seed, tokens), sampling, id=f"{name}-{seed}-{turn}")))
            except EngineError as error:
                landed[name].append(error)
            if killed.is_set():
                return

    dying = plain.workers[1]
    engines = {name: connect(plain, name, spec=SPEC, end_of_sequence=[1]) for name in plain.frontends}
    threads = [
        threading.Thread(target=ask, args=(name, engine, seed)) for name, engine in engines.items() for seed in range(4)
    ]
    before = dying.sampled()
    for thread in threads:
        thread.start()
    while dying.sampled() < before + 6 * 40:
        time.sleep(0.02)
    dying.kill()
    killed.set()
    for thread in threads:
        thread.join(240)
    said = {name: [str(one) for one in answers if isinstance(one, EngineError)] for name, answers in landed.items()}
    for answers in landed.values():
        assert len(answers) >= 4
        for answer in answers:
            if isinstance(answer, Completion):
                assert len(answer.token_ids) == 116
                assert len(answer.routes) == tokens + 115
            else:
                assert re.search(f"worker died|{LOST}", str(answer)), answer
    # Of completions Dynamo says 503, as if it had not read the request; it is sent again, and another worker answers.
    assert any("a worker died while it computed" in text for text in said["generate"]), said
    assert any("another one continued (migration)" in text for text in said["migrating"]), said
    with pytest.raises(EngineError, match=re.escape(plain.workers[1].url)):
        engines["generate"].pause()
    for engine in engines.values():
        engine.close()
    counts = ", ".join(f"{len(texts)} of {len(landed[name])} refused by {name}" for name, texts in said.items())
    verified(f"a worker killed in the middle of requests: {counts}; all others are whole, computed by one worker")


def test_an_agents_session_through_the_gateway(engine: Engine, checkpoints: Checkpoints, verified: Say) -> None:
    words = " ".join(f"t{number}" for number in range(40, 80))
    tokens = rows_fit_their_tokens(engine, checkpoints.a, words, "t9 t8")
    verified(f"gateway: a session of two turns; its rows give the log-probs of {tokens} sampled tokens in the trainer")
