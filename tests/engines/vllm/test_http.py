"""vLLM over HTTP: what a server cannot do is said when connecting; what breaks on the way is never a sample."""

from __future__ import annotations

import asyncio
import gc
import json
import pathlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from router_replay import wire
from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.vllm.http import VllmHttpEngine
from router_replay.engines.vllm.plugin import SIGN
from router_replay.engines.vllm.plugin.inactive import NOTHING
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.engines.conftest import GREEDY, KEY, Checkpoints, Servers, one, prompt
from tests.engines.stub import Reply, Stub, serving
from tests.makers import random_routes

pytest.importorskip("aiohttp")
SPEC = RouterSpec(16, 4, (1, 2, 3), num_layers=4)


def choice(tokens: int = 1, rows: int = 1, **changes: Any) -> dict[str, Any]:
    content = [{"token": "x", "logprob": -0.5}] * tokens
    given = {
        "index": 0, "token_ids": [5] * tokens, "finish_reason": "length", "logprobs": {"content": content},
        "routed_experts": wire.to_vllm(random_routes(rows, SPEC)),
    }  # fmt: skip
    return {"choices": [given | changes]}


@pytest.fixture
def fake() -> Iterator[Stub]:
    with serving() as stub:
        stub.answers["/version"] = Reply({"version": "0.30.0"})
        stub.answers["/inference/v1/generate"] = Reply(choice())
        yield stub


REQUEST = Request((7,), Sampling(max_tokens=1))


def test_a_server_outside_the_tested_range_is_refused(fake: Stub) -> None:
    fake.answers["/version"] = Reply({"version": "0.33.1"})
    with pytest.raises(EngineError, match=r"vLLM 0\.33\.1 is outside the tested range 0\.26 to 0\.32"):
        VllmHttpEngine(fake.url)


def test_a_server_that_is_not_there() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no vLLM server at http://127\.0\.0\.1:9 after 5 attempts"):
        VllmHttpEngine("http://127.0.0.1:9")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("status", "reason"), [(404, "not in development mode"), (500, "plugin is not active")])
def test_a_server_without_the_plugin_says_what_is_missing(fake: Stub, status: int, reason: str) -> None:
    fake.answers["/collective_rpc"] = Reply({"error": {"message": "no"}}, status)
    with pytest.raises(EngineError, match=reason):
        VllmHttpEngine(fake.url)  # nor does it say what its model is
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert engine.capabilities.routes
        assert not engine.capabilities.forced_routes
        assert reason in engine.capabilities.why_not
        assert len(one(engine, REQUEST).token_ids) == 1
        with pytest.raises(EngineError, match=reason):
            engine.generate([Request((7,), forced_routes=random_routes(1, SPEC))])
        with pytest.raises(EngineError, match=reason):
            engine.update_weights("/anywhere", 1)


def test_a_server_whose_vllm_does_not_fit_says_which_seam(fake: Stub) -> None:
    report = {**NOTHING, "active": False, "reason": "Router Replay is NOT active in this vLLM: X.y does not exist"}
    fake.answers["/collective_rpc"] = Reply({"results": [report]})
    with pytest.raises(EngineError, match=r"NOT active in this vLLM: X\.y does not exist"):
        VllmHttpEngine(fake.url)
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert "X.y does not exist" in engine.capabilities.why_not
        assert not engine.capabilities.versions
        assert len(one(engine, REQUEST).token_ids) == 1


def test_a_model_folder_of_this_machine_says_what_the_model_is(fake: Stub, tmp_path: pathlib.Path) -> None:
    config = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    more = {"mlp_only_layers": [0], "decoder_sparse_step": 1, "vocab_size": 99, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    fake.answers["/v1/models"] = Reply({"data": [{"id": "moe", "root": str(tmp_path), "max_model_len": 64}]})
    with VllmHttpEngine(fake.url) as engine:
        assert (engine.spec, engine.vocabulary) == (SPEC, 99)
        one(engine, REQUEST)
        assert fake.bodies("/inference/v1/generate")[-1]["sampling_params"]["stop_token_ids"] == [8, 9]
    with pytest.raises(EngineError, match="was given"):
        VllmHttpEngine(fake.url, spec=RouterSpec(8, 2, (0,)))


# -- /v1/completions ----------------------------------------------------------------------------------


def completion(tokens: int = 1, rows: int = 1, **changes: Any) -> dict[str, Any]:
    given = {
        "index": 0, "text": "", "token_ids": [5] * tokens, "finish_reason": "length",
        "logprobs": {"token_logprobs": [-0.5] * tokens},
        "routed_experts": wire.to_vllm(random_routes(rows, SPEC)),
    }  # fmt: skip
    return {"choices": [given | changes]}


@pytest.fixture
def completing(fake: Stub) -> Stub:
    """A server without /inference/v1/generate, as vLLM from 0.30 on is by default."""
    del fake.answers["/inference/v1/generate"]
    fake.answers["/v1/models"] = Reply({"data": [{"id": "moe", "root": "org/moe", "max_model_len": 16}]})
    fake.answers["/v1/completions"] = Reply(completion())
    return fake


def test_a_server_without_the_token_route_is_asked_by_completions(completing: Stub) -> None:
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        completing.answers["/v1/completions"] = Reply(completion(tokens=2, rows=3))
        sampling = Sampling(max_tokens=2, seed=3, stop_token_ids=(9,))
        [sample] = engine.generate([Request((7, 8, 9), sampling, start=1)])
    assert (sample.token_ids.tolist(), sample.logprobs.tolist(), len(sample.routes)) == ([5, 5], [-0.5, -0.5], 3)
    body = completing.bodies("/v1/completions")[-1]
    expected = {
        "prompt": [7, 8, 9], "max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "seed": 3, "stop_token_ids": [9],
        "ignore_eos": False, "n": 1, "logprobs": 0, "return_token_ids": True, "routed_experts_prompt_start": 1,
    }  # fmt: skip
    assert {name: body[name] for name in expected} == expected
    # The defaults of a generation_config.json must not reach a request.
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral


def test_a_token_route_that_was_not_asked_for_counts_as_none(completing: Stub) -> None:
    """Without --enable-scale-out, vLLM up to 0.31 answers 404 and vLLM 0.32 answers 403."""
    completing.answers["/inference/v1/generate"] = Reply({"error": {"message": "use --enable-scale-out"}}, 403)
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        assert len(engine.generate([REQUEST])) == 1
    assert completing.bodies("/v1/completions")


@pytest.mark.parametrize(("version", "asks"), [("0.26.0", True), ("0.28.1", True), ("0.29.0", False)])
def test_older_servers_are_asked_to_collect_all_samples(fake: Stub, version: str, asks: bool) -> None:
    """Up to 0.28, /inference/v1/generate answers with the samples of its last step otherwise."""
    fake.answers["/version"] = Reply({"version": version})
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        engine.generate([REQUEST])
    assert ("output_kind" in fake.bodies("/inference/v1/generate")[-1]["sampling_params"]) == asks


def test_rows_are_cut_here_where_the_server_returns_all(completing: Stub) -> None:
    """Up to 0.27, /v1/completions ignores routed_experts_prompt_start without an error."""
    completing.answers["/version"] = Reply({"version": "0.27.1"})
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        rows = random_routes(4, SPEC)
        completing.answers["/v1/completions"] = Reply(completion(2, routed_experts=wire.to_vllm(rows)))
        [sample] = engine.generate([Request((7, 8, 9), Sampling(max_tokens=2), start=1)])
        assert "routed_experts_prompt_start" not in completing.bodies("/v1/completions")[-1]
        assert sample.routes.same_sets(rows[1:])
        completing.answers["/v1/completions"] = Reply(completion(2, rows=3))
        with pytest.raises(EngineError, match="expected 4 rows"):
            engine.generate([Request((7, 8, 9), Sampling(max_tokens=2), start=1)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completion(token_ids=None), "has no token_ids"),
        (completion(token_ids=[-1]), "is not the expected JSON"),
        (completion(logprobs=None), "1 tokens, 0 log-probs"),
        (completion(logprobs={"token_logprobs": [None]}), "is not the expected JSON"),
        (completion(rows=2), "expected 1 rows"),
        (completion(routed_experts=None), "1 tokens without their experts"),
        (completion(index=1), "asked for 1 samples"),
        ({"choices": []}, "asked for 1 samples"),
        ({"object": "error"}, "is not the expected JSON"),
    ],
)
def test_a_completion_that_does_not_fit_is_no_sample(completing: Stub, answer: Any, message: str) -> None:
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        completing.answers["/v1/completions"] = Reply(answer)
        with pytest.raises(EngineError, match=message):
            one(engine, REQUEST)


def test_a_sample_that_the_server_ended_early_is_an_error(completing: Stub) -> None:
    """A generation config of the server can limit every request; the model's own limit is no error."""
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        completing.answers["/v1/completions"] = Reply(completion(tokens=2, rows=4))
        with pytest.raises(EngineError, match=r"asked for up to 9 tokens, and the server ended the sample at 2"):
            engine.generate([Request((7, 8, 9), Sampling(max_tokens=9))])
        completing.answers["/v1/completions"] = Reply(completion(tokens=2, rows=15))
        [sample] = engine.generate([Request((7,) * 14, Sampling(max_tokens=9))])
        assert len(sample.token_ids) == 2
        # The server would refuse more tokens than there is room for, where /inference/v1/generate ends the sample.
        assert completing.bodies("/v1/completions")[-1]["max_tokens"] == 2


# -- what vLLM's own calls can do ---------------------------------------------------------------------


async def begun(engine: Engine, fake: Stub, path: str, request: Request) -> asyncio.Task[list[Completion]]:
    """Submit a request, and return when the server has it."""
    before = len(fake.bodies(path))
    task = asyncio.create_task(engine.submit(request))
    while len(fake.bodies(path)) == before:
        await asyncio.sleep(0.005)
    return task


@pytest.mark.parametrize("aborts", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize(
    ("path", "answer", "name"),
    [
        ("/inference/v1/generate", choice, "generate-tokens-{}"),
        ("/v1/completions", completion, "cmpl-{}-0"),
    ],
)
def test_an_abort_names_the_request_as_the_server_does(
    completing: Stub, aborts: str, path: str, answer: Any, name: str
) -> None:
    ended = threading.Event()

    def aborted(_: Any) -> Reply:
        ended.wait(120)
        return Reply(answer(finish_reason="abort"))

    async def work(engine: Engine) -> list[Completion]:
        completing.answers |= {path: aborted, aborts: lambda _: (ended.set(), Reply({}))[1]}
        task = await begun(engine, completing, path, REQUEST)
        return [*await asyncio.to_thread(engine.abort), *await task]

    completing.answers |= {path: Reply(answer()), aborts: Reply({})}
    with VllmHttpEngine(completing.url, spec=SPEC) as engine:
        results = asyncio.run(work(engine))
    assert completing.bodies(aborts)[-1] == {"request_ids": [name.format(completing.bodies(path)[-1]["request_id"])]}
    assert [(result.finish_reason, len(result.token_ids)) for result in results] == [("abort", 1)] * 2


def test_a_server_that_cannot_abort_drops_a_request_whose_connection_closes(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert "an abort returns nothing of what was sampled" in engine.capabilities.why_not
        fake.answers["/inference/v1/generate"] = Reply(choice(), seconds=60)

        async def work() -> list[Any]:
            task = await begun(engine, fake, "/inference/v1/generate", Request((7,), Sampling(max_tokens=1, n=2)))
            return [*await asyncio.to_thread(engine.abort), *await task]

        results = asyncio.run(work())
    assert [(result.index, result.finish_reason, len(result.token_ids)) for result in results] == [
        (0, "abort", 0), (1, "abort", 0), (0, "abort", 0), (1, "abort", 0)
    ]  # fmt: skip


def test_a_server_without_a_pause_keeps_no_request(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply(choice(), seconds=60)

        async def work() -> None:
            task = await begun(engine, fake, "/inference/v1/generate", REQUEST)
            with pytest.raises(EngineError, match=r"a pause cannot keep requests.* Choose in_flight='abort' or 'wait'"):
                await asyncio.to_thread(engine.pause, "keep")
            await asyncio.to_thread(engine.pause, "abort")
            assert [(one.finish_reason, len(one.token_ids)) for one in await task] == [("abort", 0)]
            fake.answers["/inference/v1/generate"] = Reply(choice())
            later = asyncio.create_task(engine.submit(REQUEST))
            await asyncio.sleep(0.05)
            assert not later.done()
            await asyncio.to_thread(engine.resume)
            assert len(await later) == 1

        asyncio.run(work())
    assert not fake.bodies("/pause")


def server_info(**changes: Any) -> Reply:
    return Reply({"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}, **changes}})


def test_a_server_that_tells_its_settings_is_taken_at_its_word(fake: Stub) -> None:
    fake.answers["/server_info"] = server_info()
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert len(one(engine, Request((7,), Sampling(max_tokens=1, temperature=0.7))).token_ids) == 1


@pytest.mark.parametrize(("version", "stale"), [("0.30.0", True), ("0.31.0", False), ("0.32.0", False)])
@pytest.mark.parametrize(
    "settings",
    [{"cache_config": {"kv_offloading_size": 4.0}}, {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}],
)
def test_a_server_that_offloads_kv_is_refused_where_its_rows_are_stale(
    fake: Stub, version: str, stale: bool, settings: Any
) -> None:
    fake.answers |= {"/version": Reply({"version": version}), "/server_info": server_info(**settings)}
    with (
        pytest.raises(EngineError, match="rows that do not belong to their tokens") if stale else nullcontext(),
        VllmHttpEngine(fake.url, spec=SPEC),
    ):
        pass


@pytest.mark.parametrize(
    ("version", "seed", "named"), [("0.30.0", 3, True), ("0.30.0", None, False), ("0.32.0", 3, False)]
)
def test_a_seed_is_named_where_it_can_have_ended_the_server(
    fake: Stub, version: str, seed: int | None, named: bool
) -> None:
    fake.answers["/version"] = Reply({"version": version})
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply({"error": {"message": "EngineCore has an issue"}}, 500)
        with pytest.raises(EngineError, match="the server answered 500: EngineCore has an issue") as caught:
            one(engine, Request((7,), Sampling(max_tokens=1, seed=seed)))
    assert ("leave out the seed" in str(caught.value)) == named


def test_the_requests_of_a_failed_batch_print_nothing_when_the_engine_is_closed(
    fake: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        slow, failed = Reply(choice(), seconds=60), Reply({"error": "no"}, 500)
        fake.answers["/inference/v1/generate"] = lambda body: failed if body["token_ids"] == [8] else slow
        with pytest.raises(EngineError, match="answered 500"):
            engine.generate([Request((token,), Sampling(max_tokens=1)) for token in (7, 8, 9)])
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


# -- several ranks ------------------------------------------------------------------------------------

REPORT = {
    "captures": True, "forced_routes": True, "reason": "", "logprobs_mode": "processed_logprobs",
    "config": json.dumps({"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "vocab_size": 99,
                          "num_hidden_layers": 4, "mlp_only_layers": [0]}),
    "generation_config": "{}",
}  # fmt: skip
TWO_WORKERS = {"/get_world_size": Reply({"world_size": 2})}
WITH_PLUGIN = {**TWO_WORKERS, "/server_info": Reply({"vllm_env": {SIGN: "0.1.0"}})}


@pytest.mark.parametrize("info", [None, {}, {"vllm_env": {"VLLM_PORT": 1}}])
def test_several_workers_that_show_no_plugin_are_not_asked_for_it(fake: Stub, info: Any) -> None:
    """vLLM would keep the errors of all workers but the first, and its next call to them would fail."""
    fake.answers |= TWO_WORKERS if info is None else {**TWO_WORKERS, "/server_info": Reply(info)}
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert "the plugin is not active" in engine.capabilities.why_not
    assert "/collective_rpc" not in fake.asked


def test_a_server_of_which_only_one_rank_answers_is_refused(fake: Stub) -> None:
    fake.answers |= {"/collective_rpc": Reply({"results": [REPORT]}), **WITH_PLUGIN}
    with pytest.raises(EngineError, match=r"the server has 2 ranks, and .* has the answers of 1"):
        VllmHttpEngine(fake.url)
    del fake.answers["/get_world_size"]
    with pytest.raises(EngineError, match="get_world_size answered 404"):
        VllmHttpEngine(fake.url)


def test_what_one_rank_cannot_do_the_server_cannot(fake: Stub) -> None:
    other = {**REPORT, "forced_routes": False, "reason": "no rule"}
    fake.answers |= {"/collective_rpc": Reply({"results": [REPORT, other]}), **WITH_PLUGIN}
    with VllmHttpEngine(fake.url) as engine:
        assert (engine.capabilities.forced_routes, engine.capabilities.why_not) == (False, "no rule")
    fake.answers["/collective_rpc"] = Reply({"results": [REPORT, {**REPORT, "active": False, "reason": "seam"}]})
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert (engine.capabilities.versions, "seam" in engine.capabilities.why_not) == (False, True)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_update_that_not_every_rank_answers_ends_the_engine(fake: Stub, workers: int) -> None:
    loaded = {"reason": "", "progress": {}}

    def answer(body: Any) -> Reply:
        if "report" in body["method"]:
            return Reply({"results": [REPORT, REPORT]})
        return Reply({"results": [loaded] * (workers if "update_weights" in body["method"] else 2)})

    fake.answers |= {"/collective_rpc": answer, **WITH_PLUGIN}
    fake.answers |= {path: Reply({"success": True}) for path in ("/pause", "/resume", "/reset_prefix_cache")}
    with VllmHttpEngine(fake.url) as engine:
        with pytest.raises(EngineError, match=f"expected the answers of 2 workers, got {workers}"):
            engine.update_weights("/weights", 1)
        assert engine.version == 0


def test_a_server_that_captures_nothing_says_so(fake: Stub) -> None:
    fake.answers["/inference/v1/generate"] = Reply(choice(routed_experts=None))
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        assert not engine.capabilities.routes
        assert "without --enable-return-routed-experts" in engine.capabilities.why_not
        assert not one(engine, REQUEST).routes.captured.any()


def test_a_server_that_is_busy_is_asked_again_and_then_given_up(fake: Stub) -> None:
    full = {"error": {"message": "full"}}
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = [Reply(full, 503), Reply(full, 429), Reply(choice()), Reply(full, 503)]
        assert len(one(engine, REQUEST).token_ids) == 1
        fake.asked.clear()
        with pytest.raises(EngineError, match="answered 503: full"):
            one(engine, REQUEST)
        assert len(fake.asked) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"index": "x"}]}, "is not the expected JSON"),
        (choice(index=1), "asked for 1 samples"),
        (choice(rows=2), "expected 1 rows"),
        (choice(logprobs=None), "1 tokens, 0 log-probs"),
        (choice(finish_reason="error"), "finish_reason 'error'"),
        (choice(routed_experts="AAAA"), "not a .npy file"),
    ],
)
def test_an_answer_that_does_not_fit_is_no_sample(fake: Stub, answer: Any, message: str) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply(answer)
        with pytest.raises((EngineError, ValueError), match=message):
            one(engine, REQUEST)


def test_an_answer_that_breaks_off_is_no_sample(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC) as engine:
        fake.answers["/inference/v1/generate"] = Reply(choice(), sent=40)
        fake.asked.clear()
        with pytest.raises(EngineError, match="broke before the answer was complete"):
            one(engine, REQUEST)
        assert len(fake.asked) == 1  # a request that was begun is not sent again behind the caller's back


def test_a_server_that_is_too_slow(fake: Stub) -> None:
    with VllmHttpEngine(fake.url, spec=SPEC, timeout=0.5) as engine:
        fake.answers["/inference/v1/generate"] = Reply(choice(), seconds=60)
        with pytest.raises(EngineError, match="did not answer in time"):
            one(engine, REQUEST)


def test_log_probs_of_another_temperature_are_refused(fake: Stub) -> None:
    with (
        VllmHttpEngine(fake.url, spec=SPEC) as engine,
        pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"),
    ):
        engine.generate([Request((7,), Sampling(max_tokens=1, temperature=0.7))])


# -- a real server ------------------------------------------------------------------------------------


def post(url: str, body: Any) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("start", [0, 2, 5])
def test_rows_of_the_openai_routes(
    vllm_http_engine: Engine, servers: Servers, checkpoints: Checkpoints, start: int
) -> None:
    """Completions and chat return the rows of the same tokens on the token route."""
    tokens = (5, 6, 7, 8, 9)
    expected = one(vllm_http_engine, Request(tokens, Sampling(4, 0.0, ignore_eos=True)))
    common = {
        "model": checkpoints.b, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
        "routed_experts_prompt_start": start,
    }  # fmt: skip
    words = " ".join(f"t{token}" for token in tokens)
    for path, body in (
        ("/v1/completions", {"prompt": list(tokens)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
    ):
        status, answer = post(servers.ours.url + path, common | body)
        assert status == 200, answer
        rows = wire.from_vllm(answer["choices"][0]["routed_experts"], vllm_http_engine.spec)
        assert rows.same_sets(expected.routes[start:]), path


@pytest.mark.parametrize("text", ["AAAA", "not base64!", 5, None])
def test_bad_rows_are_an_error_of_the_request_and_the_server_lives(
    vllm_http_engine: Engine, servers: Servers, text: Any
) -> None:
    extra = {"extra_args": {"router_replay": text}, "max_tokens": 1}
    status, answer = post(servers.ours.url + "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": extra})
    assert status == (200 if text is None else 400)
    if text is not None:
        assert "extra_args.router_replay" in answer["error"]["message"]
    assert len(one(vllm_http_engine, Request(prompt(), GREEDY)).token_ids) == 20


def test_too_many_rows_are_an_error_of_the_request(vllm_http_engine: Engine, servers: Servers) -> None:
    from router_replay.engines.vllm.requests import extra_arguments

    extra = {"extra_args": extra_arguments(random_routes(3, vllm_http_engine.spec))}
    status, answer = post(servers.ours.url + "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": extra})
    assert (status, "3 forced rows for a prompt of 2 tokens" in answer["error"]["message"]) == (400, True)
