"""What is found out about a Dynamo when connecting, and what is said of it."""

from __future__ import annotations

import pytest

from router_replay.engines import Request, Sampling
from router_replay.engines.dynamo import DynamoEngine
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.dynamo.server import (
    COMPLETIONS,
    DIED,
    GENERATE,
    NO_PLUGIN,
    NO_ROUTE,
    PLUGIN,
    PROMPT,
    SPEC,
    Plugin,
    answer,
    generated,
    one,
    only_completions,
)
from tests.engines.stub import Reply, Stub


def test_with_everything(whole: DynamoEngine) -> None:
    can = whole.capabilities
    assert (can.routes, can.forced_routes, can.start, can.versions, can.why_not) == (True, True, True, True, "")
    assert whole.spec == SPEC
    assert whole.vocabulary == 128


def test_with_nothing(stub: Stub) -> None:
    with DynamoEngine(stub.url, SPEC) as engine:
        can = engine.capabilities
        assert (can.routes, can.forced_routes, can.start, can.versions) == (True, False, False, False)
        assert "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1" in can.why_not
        assert "no workers= were given" in can.why_not
    with DynamoEngine(stub.url, SPEC, workers=[stub.url]) as engine:
        assert "ROUTER_REPLAY_VLLM=1" in engine.capabilities.why_not
        assert "gpu_workers=True" in engine.capabilities.why_not


@pytest.mark.parametrize("reply", [NO_ROUTE, DIED, Reply({"message": "not implemented"}, 501)])
def test_a_generate_route_that_does_not_answer_is_not_used(stub: Stub, reply: Reply) -> None:
    stub.answers[GENERATE] = reply
    with DynamoEngine(stub.url, SPEC) as engine:
        stub.asked.clear()
        one(engine, Request(PROMPT, Sampling(3, ignore_eos=True)))
        assert [path for path, _ in stub.asked] == [COMPLETIONS]


def test_the_start_is_sent_where_a_server_takes_it(stub: Stub) -> None:
    stub.answers[COMPLETIONS] = lambda body: answer(start=body["nvext"]["routed_experts_prompt_start"])
    with DynamoEngine(stub.url, SPEC) as engine:
        assert engine.capabilities.start
        completion = one(engine, Request(PROMPT, Sampling(3, ignore_eos=True), start=2))
        assert (completion.start, len(completion.routes)) == (2, 4)
        assert stub.bodies(COMPLETIONS)[-1]["nvext"]["routed_experts_prompt_start"] == 2


def test_log_probs_of_another_distribution(stub: Stub) -> None:
    """The first request may draw the likeliest token only: its log-prob is 0 where log-probs are the sampler's."""
    with DynamoEngine(stub.url, SPEC) as engine:
        assert stub.bodies(COMPLETIONS)[-1]["top_k"] == 1
        with pytest.raises(EngineError, match=r"temperature 0\.7.*--enable-rl"):
            one(engine, Request(PROMPT, Sampling(3, temperature=0.7, ignore_eos=True)))
    only_completions(stub, answer(logprobs={"token_logprobs": [0.0] * 3}))
    with DynamoEngine(stub.url, SPEC) as engine:
        one(engine, Request(PROMPT, Sampling(3, temperature=0.7, ignore_eos=True)))


def test_capture_is_looked_for_more_than_once(stub: Stub) -> None:
    """vLLM 0.30 loses the rows of the first answer now and then."""
    stub.answers[GENERATE] = [generated(routed_experts=None), generated(routed_experts=None), generated()]
    with DynamoEngine(stub.url, SPEC) as engine:
        assert engine.capabilities.routes
    stub.answers[GENERATE] = generated(routed_experts=None)
    with DynamoEngine(stub.url, SPEC) as engine:
        assert not engine.capabilities.routes
        assert "--enable-return-routed-experts" in engine.capabilities.why_not


def test_refusals(stub: Stub) -> None:
    with pytest.raises(EngineError, match="pass model="):
        DynamoEngine(stub.url, SPEC, model="other")
    with pytest.raises(EngineError, match=r"list of URLs"):
        DynamoEngine(stub.url, SPEC, workers=stub.url)
    with pytest.raises(EngineError, match=r"pass spec="):
        DynamoEngine(stub.url, workers=[stub.url])
    with pytest.raises(EngineError, match="kv_transfer_config"):
        DynamoEngine(stub.url, SPEC, settings={"kv_transfer_config": {"kv_connector": "NixlConnector"}})
    stub.answers["/v1/models"] = Reply({"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(EngineError, match="pass model="):
        DynamoEngine(stub.url, SPEC)
    stub.answers["/v1/models"] = Reply({"object": "list", "data": []})
    with pytest.raises(EngineError, match="no model yet"):
        DynamoEngine(stub.url, SPEC)
    stub.answers["/v1/models"] = Reply([1])
    with pytest.raises(EngineError, match="Is this Dynamo"):
        DynamoEngine(stub.url, SPEC)


def test_a_request_of_one_token_that_fails(stub: Stub) -> None:
    stub.answers[COMPLETIONS] = DIED
    with pytest.raises(EngineError, match="asked for one token, answered 500"):
        DynamoEngine(stub.url, SPEC)


def test_workers_that_differ_are_refused(stub: Stub, plugin: Plugin) -> None:
    other = Plugin()
    other.report["logprobs_mode"] = "raw_logprobs"
    answers = iter([plugin, other])
    stub.answers[PLUGIN] = lambda body: next(answers)(body)
    with pytest.raises(EngineError, match="differ in their model or their settings"):
        DynamoEngine(stub.url, workers=[stub.url, stub.url])
    stub.answers[PLUGIN] = plugin
    with pytest.raises(EngineError, match=r"but spec=.* was given"):
        DynamoEngine(stub.url, RouterSpec(8, 2, (0,)), workers=[stub.url])


@pytest.mark.parametrize("second", [NO_PLUGIN, Reply({"status": "ok", "results": [{"active": False}]})])
def test_a_worker_without_the_plugin(stub: Stub, plugin: Plugin, second: Reply) -> None:
    """One of two is enough to go without: requests and weights reach both."""
    if second is not NO_PLUGIN:
        inactive = {**plugin.report, "active": False, "reason": "seam X is not there"}
        second = Reply({"status": "ok", "results": [inactive]})
    answers = iter([plugin, lambda _: second])
    stub.answers[PLUGIN] = lambda body: next(answers)(body)
    with DynamoEngine(stub.url, SPEC, workers=[stub.url, stub.url]) as engine:
        assert not engine.capabilities.forced_routes
        assert ("not in every worker" if second is NO_PLUGIN else "seam X") in engine.capabilities.why_not


def test_a_report_that_is_none(stub: Stub) -> None:
    stub.answers[PLUGIN] = Reply({"status": "ok", "results": [{"captures": 3}]})
    with pytest.raises(EngineError, match="is not the expected JSON"):
        DynamoEngine(stub.url, SPEC, workers=[stub.url])
    stub.answers[PLUGIN] = Reply({"status": "error", "message": "engine core is dead"})
    with pytest.raises(EngineError, match="engine core is dead"):
        DynamoEngine(stub.url, SPEC, workers=[stub.url])
