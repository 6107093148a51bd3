"""What SglangEngine promises, on a real SGLang server, run by `make test-sglang`; `make test` does not collect it.

Named so that only an explicit path collects it: the server needs an environment of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from router_replay.engines import Completion, Request, Sampling
from router_replay.engines.sglang import SglangEngine
from router_replay.engines.sglang.answers import routes_of_openai
from router_replay.errors import EngineError
from tests.gateway.two_turns import rows_fit_their_tokens
from tests.sglang_real.conftest import Server, prompt
from tests.verify.by_url import check_verdicts

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=300, ignore_eos=True)
PAYLOAD = pathlib.Path(__file__).parents[1] / "engines" / "sglang" / "payloads" / "sglang_generate.json"
Models = tuple[pathlib.Path, pathlib.Path]
Say = Callable[[str], None]


def one(engine: SglangEngine, request: Request) -> Completion:
    [completion] = engine.generate([request])
    return completion


def in_background(
    engine: SglangEngine, request: Request, server: Server | None
) -> tuple[threading.Thread, list[object]]:
    """Start a request, and come back when the server runs it; without a server, when it can be there."""
    landed: list[object] = []

    def work() -> None:
        try:
            landed.extend(engine.generate([request]))
        except EngineError as error:
            landed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    while server is not None and not server.running() and not landed:
        time.sleep(0.01)
    return thread, landed


def test_verify_finds_the_checkpoint_of_the_server(
    engine: SglangEngine,  # so that the server is on checkpoint A
    server: Server,
    models: Models,
    capsys: pytest.CaptureFixture[str],
    verified: Say,
) -> None:
    check_verdicts(capsys, f"sglang={server.url}", str(models[0]), str(models[1]))
    verified("verify: no fault on the right checkpoint, and another one is named")


def test_rows_and_start(engine: SglangEngine, verified: Say) -> None:
    whole = one(engine, Request(prompt(), GREEDY))
    assert engine.spec.num_experts == 16
    assert len(whole.routes) == 20 + 12 - 1
    for start in (1, 12, 19):
        part = one(engine, Request(prompt(), GREEDY, start=start))
        assert part.routes.same_sets(whole.routes[start:])
        assert part.token_ids.tolist() == whole.token_ids.tolist()
    again = one(engine, Request(prompt(), GREEDY))
    assert again.routes.same_sets(whole.routes)
    verified("rows [start_len, seqlen - 1) for start 0, 1, 12, last; the same with and without a prefix-cache hit")


def test_a_server_that_answers_says_so(engine: SglangEngine, verified: Say) -> None:
    engine.ping()
    verified("ping: /health answers")


def test_log_probs_are_those_at_the_temperature(engine: SglangEngine, verified: Say) -> None:
    cold = one(engine, Request(prompt(), Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)))
    # Drawn without a seed, which this server does not take: enough of them that the likeliest token is among them.
    warm = engine.generate([Request(prompt(), Sampling(max_tokens=1, temperature=4.0, top_p=0.3)) for _ in range(200)])
    same = [sample.logprobs[0] for sample in warm if sample.token_ids[0] == cold.token_ids[0]]
    assert same
    assert max(same) < cold.logprobs[0] - 0.5
    verified(
        f"log-probs are of the distribution at the temperature, before top-p: {cold.logprobs[0]:.2f} -> {same[0]:.2f}"
    )


def test_samples_have_rows_of_their_own(engine: SglangEngine, verified: Say) -> None:
    two = engine.generate([Request(prompt(), Sampling(max_tokens=12, ignore_eos=True, n=2))])
    assert [sample.index for sample in two] == [0, 1]
    assert two[0].token_ids.tolist() != two[1].token_ids.tolist()
    assert two[0].routes[:20].same_sets(two[1].routes[:20])
    assert not two[0].routes.same_sets(two[1].routes)
    verified("n = 2: each sample has its own rows, equal over the prompt")


def test_openai_routes(engine: SglangEngine, server: Server, verified: Say) -> None:
    body = {"model": "m", "prompt": list(prompt()), "max_tokens": 6, "temperature": 0, "return_routed_experts": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    whole = one(engine, Request(prompt(), Sampling(max_tokens=6, temperature=0.0)))
    assert routes_of_openai(answer, engine.spec).same_sets(whole.routes)
    _, answer = server.post("/v1/completions", {**body, "routed_experts_start_len": 7})
    assert routes_of_openai(answer, engine.spec, start=7).same_sets(whole.routes[7:])
    status, answer = server.post("/v1/completions", {**body, "n": 2, "temperature": 1})
    assert status == 200
    assert isinstance(json.loads(answer)["sglext"]["routed_experts"], str)
    with pytest.raises(EngineError, match="2 choices"):
        routes_of_openai(answer, engine.spec)
    verified("/v1/completions: sglext equals /generate; n = 2 brings one array and is refused")


def test_abort_returns_what_there_is(engine: SglangEngine, server: Server, verified: Say) -> None:
    request = Request(prompt(3), LONG)
    thread, landed = in_background(engine, request, server)
    [partial] = engine.abort([request.id])
    thread.join(60)
    assert landed == [partial]
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 300
    assert len(partial.routes) == 20 + len(partial.token_ids) - 1
    assert partial.routes.all_captured
    verified(f"abort: {len(partial.token_ids)} of 300 tokens come back with all their rows")


def test_pause_holds_and_abort_works_while_paused(engine: SglangEngine, server: Server, verified: Say) -> None:
    request = Request(prompt(4), LONG)
    thread, landed = in_background(engine, request, server)
    engine.pause("keep")
    waiting = Request(prompt(5), GREEDY)
    late, late_landed = in_background(engine, waiting, None)
    time.sleep(0.5)
    assert not landed
    assert not late_landed
    [never] = engine.abort([waiting.id])
    assert never.finish_reason == "abort"
    assert not len(never.token_ids)
    [partial] = engine.abort([request.id])
    assert partial.finish_reason == "abort"
    engine.resume()
    assert one(engine, Request(prompt(5), GREEDY)).finish_reason == "length"
    thread.join(60)
    late.join(60)
    verified("pause keeps requests, new ones wait; both can be aborted while paused; resume goes on")


def test_weights_change_and_come_back(engine: SglangEngine, models: Models, verified: Say) -> None:
    old = one(engine, Request(prompt(6), GREEDY))
    engine.update_weights(str(models[1]), version=1)
    new = one(engine, Request(prompt(6), GREEDY))
    assert set(new.versions.tolist()) == {1}
    assert set(new.routes.versions.tolist()) == {1}
    assert not new.routes.same_sets(old.routes)
    engine.update_weights(str(models[0]), version=2)
    back = one(engine, Request(prompt(6), GREEDY))
    assert back.routes.same_sets(old.routes)
    assert back.token_ids.tolist() == old.token_ids.tolist()
    assert np.abs(back.logprobs - old.logprobs).max() == 0.0
    verified("update_weights_from_disk: A -> B changes rows and versions, B -> A is equal to the bit")


def test_swap_with_a_request_held_in_place(engine: SglangEngine, server: Server, models: Models, verified: Say) -> None:
    request = Request(prompt(7), Sampling(max_tokens=300, temperature=0.0, ignore_eos=True))
    before = one(engine, request)
    thread, landed = in_background(engine, Request(request.token_ids, request.sampling, id="held"), server)
    engine.update_weights(str(models[1]), version=1, in_flight="keep")
    thread.join(60)
    [held] = landed
    assert isinstance(held, Completion), held
    assert sorted(set(held.versions.tolist())) == [0, 1]
    first = int(np.argmax(held.versions == 1))
    assert held.token_ids[:first].tolist() == before.token_ids[:first].tolist()
    assert held.routes[: 20 + first - 1].same_sets(before.routes[: 20 + first - 1])
    assert held.routes.versions[20 + first - 2 :][:2].tolist() == [0, 1]
    # KV and rows of the kept request are of two policies; a new one must not find them in the prefix cache.
    fresh = one(engine, Request(request.token_ids, GREEDY))
    engine.update_weights(str(models[1]), version=2)
    assert one(engine, Request(request.token_ids, GREEDY)).routes.same_sets(fresh.routes)
    verified(f"swap with a request held in place: {first} tokens and their rows are the old weights', the rest new")


def test_retract_and_swap_is_refused(engine: SglangEngine, server: Server, models: Models, verified: Say) -> None:
    thread, landed = in_background(engine, Request(prompt(8), LONG), server)
    assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
    body = {"model_path": str(models[1]), "weight_version": "7"}
    assert server.post("/update_weights_from_disk", body)[0] == 200
    engine._connected._names["7"] = 7  # as if this engine had loaded it: the retraction alone must be enough
    server.post("/continue_generation", {})
    thread.join(60)
    [error] = landed
    assert isinstance(error, EngineError)
    assert "retractions" in str(error)
    verified(f"retract + swap by another client is refused: {str(error)[:110]}...")


def test_weights_of_another_client_are_refused(
    engine: SglangEngine, server: Server, models: Models, verified: Say
) -> None:
    server.post("/update_weights_from_disk", {"model_path": str(models[1]), "weight_version": "theirs"})
    with pytest.raises(EngineError, match="theirs"):
        one(engine, Request(prompt(), GREEDY))
    verified("an answer sampled by weights that this engine did not load is refused")


def test_an_unflushed_cache_is_seen(engine: SglangEngine, server: Server, models: Models, verified: Say) -> None:
    """Somebody else's request holds the cache while weights change."""
    body = {"input_ids": list(prompt(9)), "sampling_params": {"max_new_tokens": 480, "ignore_eos": True}}
    other = threading.Thread(target=server.post, args=("/generate", body))
    other.start()
    while not server.running():
        time.sleep(0.01)
    with pytest.raises(EngineError, match="did not flush its cache"):
        engine.update_weights(str(models[1]), version=1)
    other.join(60)
    verified("a foreign request in flight: the update answers 'not flushed', the retries end, the engine refuses")


def test_a_folder_that_is_not_there(engine: SglangEngine, verified: Say) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    with pytest.raises(EngineError, match="did not load /nowhere"):
        engine.update_weights("/nowhere", version=1)
    after = one(engine, Request(prompt(), GREEDY))
    assert after.routes.same_sets(before.routes)
    assert set(after.versions.tolist()) == {0}
    verified("a missing folder: refused, and the old weights go on")


def test_the_recorded_payload_is_still_what_comes(engine: SglangEngine, server: Server, verified: Say) -> None:
    """SGLANG_RECORD=1 writes it anew, for when SGLang changes. Times are left out: they are no part of the contract."""
    body = {"input_ids": list(prompt(0, 6)), "return_logprob": True, "return_routed_experts": True}
    body["sampling_params"] = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    server.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    status, answer = server.post("/generate", body)
    assert status == 200
    recorded = json.loads(answer)
    for name in ("e2e_latency", "response_sent_to_client_ts"):
        recorded["meta_info"].pop(name, None)
    if os.environ.get("SGLANG_RECORD") == "1":
        PAYLOAD.write_text(json.dumps(recorded, indent=1) + "\n")
    assert len(base64.b64decode(recorded["meta_info"]["routed_experts"])) == (6 + 4 - 1) * 2 * 4 * 4
    kept = json.loads(PAYLOAD.read_text())
    assert set(kept["meta_info"]) == set(recorded["meta_info"])
    assert set(kept) == set(recorded)
    verified(f"the fields of {PAYLOAD.name} are those that come")


def test_many_at_once(engine: SglangEngine, verified: Say) -> None:
    async def all_of_them() -> list[list[Completion]]:
        requests = [Request(prompt(seed, 5 + seed), GREEDY) for seed in range(24)]
        return await asyncio.gather(*(engine.submit(request) for request in requests))

    landed = asyncio.run(all_of_them())
    alone = [one(engine, Request(prompt(seed, 5 + seed), GREEDY)) for seed in range(24)]
    equal = [a.routes.same_sets(b.routes) for [a], b in zip(landed, alone, strict=True)]
    assert np.mean(equal) > 0.9  # other batches, other rounding: a rare tie may fall the other way
    verified(f"24 requests at once, 8 running: rows of {sum(map(bool, equal))} equal those of a run alone")


def test_an_agents_session_through_the_gateway(engine: SglangEngine, models: Models, verified: Say) -> None:
    words = " ".join(f"w{token}" for token in prompt(11, 40))
    tokens = rows_fit_their_tokens(engine, str(models[0]), words, "w9 w8")
    verified(f"gateway: a session of two turns; its rows give the log-probs of {tokens} sampled tokens in the trainer")
