"""Connects to a vLLM server, ours or a user's own, by URL: `/inference/v1/generate`, tokens in and tokens out.

    with VllmHttpEngine("http://127.0.0.1:8000") as engine:
        print(engine.capabilities.why_not)      # what this server cannot do, found out when connecting

`engines/http.py` describes which calls are retried and which failures raise EngineError; partially received answers
are discarded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from router_replay import wire
from router_replay.engines import checks
from router_replay.engines.backend import Flight
from router_replay.engines.http import Http, TokenId, answer_limit, checked_url, decoded, parsed, printable, refusal
from router_replay.engines.types import Capabilities, InFlight, Request, Sampling
from router_replay.engines.vllm.client import Transport, VllmClient
from router_replay.engines.vllm.requests import end_of_sequence_ids, sampling_arguments
from router_replay.engines.vllm.samples import Sample
from router_replay.engines.vllm.versions import refuse_version
from router_replay.errors import EngineError, RouterReplayError
from router_replay.spec import RouterSpec

GENERATE = "/inference/v1/generate"
WORKERS_LIMIT = 64 << 20  # bytes: each of many workers reports the progress of thousands of requests


class VllmHttpEngine(VllmClient):
    """Connects to one vLLM server at `url`. `version` is the policy version of the weights that it has now.

    `timeout` limits one generation or weight update, in seconds; `api_key` is the server's API key.
    `spec` is required if the server lacks the plugin; `vocabulary`, the vocabulary size, is optional there.
    `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for 64 consecutive tokens.
    """

    def __init__(
        self,
        url: str,
        *,
        version: int = 0,
        spec: RouterSpec | None = None,
        timeout: float = 3600.0,
        api_key: str | None = None,
        vocabulary: int | None = None,
        allow_zero_layers: bool = False,
    ) -> None:
        given, address, seconds = checks.vocabulary(vocabulary), checked_url(url), checks.seconds(timeout, "timeout")
        super().__init__(
            lambda: _connect(address, spec, given, seconds, api_key), version, allow_zero_layers=allow_zero_layers
        )


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]


def samples_of(body: bytes, spec: RouterSpec) -> list[Sample]:
    """Return the choices of a generate response. Raises EngineError if the body is not a valid response."""
    response = decoded(body, _Response, f"the server's answer to {GENERATE}")
    samples = []
    for choice in response.choices:
        content = (choice.logprobs.content if choice.logprobs else None) or []
        rows = None
        if choice.routed_experts is not None:
            rows = wire.from_vllm(choice.routed_experts, spec, allow_zero_layers=True)  # CaptureWatch counts them
        logprobs = [token.logprob for token in content]
        samples.append(Sample(choice.index, choice.token_ids or [], logprobs, rows, choice.finish_reason))
    return samples


class _Report(msgspec.Struct):
    """Holds the fields of the plugin's report that are used here."""

    captures: bool
    forced_routes: bool
    reason: str
    logprobs_mode: str
    config: str
    generation_config: str
    active: bool = True


class _Reports(msgspec.Struct):
    results: list[_Report]


async def _connect(
    url: str, spec: RouterSpec | None, vocabulary: int | None, timeout: float, api_key: str | None
) -> Transport:
    http = Http(url, timeout, "vLLM", "Start one with: router-replay serve MODEL", api_key=api_key)
    try:
        refuse_version(str((await http.expect_object("GET", "/version")).get("version", "unknown"))[:40])
        status, _ = await http.request("POST", GENERATE, {})
        if status in (404, 405):
            raise EngineError(f"{url} has no {GENERATE}: start it with --enable-scale-out, or with router-replay serve")
        return await _probe(http, spec, vocabulary)
    except BaseException:
        await http.close()
        raise


async def _probe(http: Http, spec: RouterSpec | None, vocabulary: int | None) -> Transport:
    """Find out what the server can do, and the reasons for what it cannot, and return a transport for it."""
    place = f"{http.url}/collective_rpc"
    body = {"method": "router_replay_report"}
    status, answer = await http.request("POST", "/collective_rpc", body, limit=WORKERS_LIMIT)
    if status in (401, 403):
        raise refusal(place, status, answer)
    reason = "the plugin is not active on the server (it needs router-replay installed there, and ROUTER_REPLAY_VLLM=1)"
    if status == 404:
        reason = (
            "the server is not in development mode (VLLM_SERVER_DEV_MODE=1), so it can neither pause nor load weights"
        )
    elif status == 200:
        reports = decoded(answer, _Reports, f"the answer of {place}").results
        if not reports:
            raise EngineError(f"{place}: expected the report of at least one worker, got none")
        if reports[0].active:
            return _with_plugin(http, reports[0], spec, vocabulary)
        reason = printable(reports[0].reason[:2000])
    return await _without_plugin(http, spec, vocabulary, reason)


def _with_plugin(http: Http, report: _Report, spec: RouterSpec | None, vocabulary: int | None) -> Transport:
    place = f"{http.url}/collective_rpc"
    config = _settings(report.config, place)
    capabilities = Capabilities(
        routes=report.captures,
        forced_routes=report.forced_routes,
        start=True,
        versions=True,
        why_not=printable(report.reason[:2000]) or ("" if report.captures else _NO_CAPTURE),
    )
    try:
        found = RouterSpec.from_config(config)
        tokens = checks.same_vocabulary(vocabulary, checks.vocabulary_of(config))
        stops = end_of_sequence_ids(_settings(report.generation_config, place)) or end_of_sequence_ids(config)
    except Exception as error:  # the server may send anything
        raise EngineError(
            f"the model's config in the answer of {place} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if spec is not None and spec != found:
        raise EngineError(f"the model of {http.url} has {found}, but spec={spec} was given")
    return _OverHttp(http, found, tokens, capabilities, report.logprobs_mode, stops)


async def _without_plugin(http: Http, spec: RouterSpec | None, vocabulary: int | None, reason: str) -> Transport:
    if spec is None:
        raise EngineError(
            f"the routers of the server's model are unknown: {reason}. Pass spec=RouterSpec.from_config(config), or "
            "start the server with router-replay serve"
        )
    capabilities = Capabilities(routes=True, forced_routes=False, start=True, versions=False, why_not=reason)
    bare = _OverHttp(http, spec, vocabulary, capabilities, "raw_logprobs", ())
    if not await bare.captures():
        bare.capabilities = dataclasses.replace(capabilities, routes=False, why_not=f"{_NO_CAPTURE}; {reason}")
    return bare


def _settings(text: str, place: str) -> dict[str, Any]:
    """Parse a config in the plugin's report. The json module writes NaN and Infinity, which msgspec cannot read."""
    config = parsed(text, place)
    config = {} if config is None else config  # a model without a generation config
    if not isinstance(config, dict):
        raise EngineError(f"{place}: expected a JSON object as the model's config, got {text[:200]}")
    return config


_NO_CAPTURE = "the server was started without --enable-return-routed-experts"


class _OverHttp(Transport):
    def __init__(
        self,
        http: Http,
        spec: RouterSpec,
        vocabulary: int | None,
        capabilities: Capabilities,
        logprobs_mode: str,
        stops: tuple[int, ...],
    ) -> None:
        self._http = http
        self.spec = spec
        self.vocabulary = vocabulary
        self.capabilities = capabilities
        self.logprobs_mode = logprobs_mode
        self._end_of_sequence = stops

    async def captures(self) -> bool:
        """Generate one token, and return whether the answer has a row."""
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}
        limit = answer_limit(Request((0,), Sampling(max_tokens=1)), self.spec, samples=1)
        status, answer = await self._http.request("POST", GENERATE, body, patient=True, limit=limit)
        if status != 200:
            raise refusal(f"{self._http.url}{GENERATE}", status, answer)
        choices = decoded(answer, _Response, f"the server's answer to {GENERATE}").choices
        return bool(choices) and choices[0].routed_experts is not None

    async def generate(self, flight: Flight) -> list[Sample]:
        request = flight.request
        body = {
            "request_id": flight.name,
            "token_ids": list(map(int, request.token_ids)),
            "sampling_params": sampling_arguments(request, self._end_of_sequence, as_text=True),
            "cache_salt": flight.salt,
        }
        limit = answer_limit(request, self.spec, samples=request.sampling.n)
        status, answer = await self._http.request("POST", GENERATE, body, patient=True, limit=limit)
        if status != 200:
            raise refusal(f"{request.id}: the server", status, answer)
        try:
            return samples_of(answer, self.spec)
        except RouterReplayError as error:
            raise EngineError(f"{request.id}: {error}") from error

    async def abort(self, names: Sequence[str]) -> None:
        self._refuse_bare()
        ids = [f"generate-tokens-{name}" for name in names]  # the server's own prefix for this route
        await self._http.expect("POST", "/abort_requests", {"request_ids": ids})

    async def pause(self, mode: InFlight) -> None:
        self._refuse_bare()
        await self._http.expect("POST", "/pause", query={"mode": mode, "clear_cache": "false"}, patient=True)

    async def resume(self) -> None:
        self._refuse_bare()
        await self._http.expect("POST", "/resume", patient=True)

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        self._refuse_bare()
        body = {"method": method, "kwargs": arguments}
        answer = await self._http.expect_object("POST", "/collective_rpc", body, patient=True, limit=WORKERS_LIMIT)
        results = answer.get("results")
        if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
            raise EngineError(
                f"{self._http.url}/collective_rpc: expected a JSON object from every worker, got {str(answer)[:200]}"
            )
        return results

    async def reset_prefix_cache(self) -> bool:
        answer = await self._http.expect_object("POST", "/reset_prefix_cache", patient=True)
        return answer.get("success") is True

    async def close(self) -> None:
        await self._http.close()

    def _refuse_bare(self) -> None:
        if not self.capabilities.versions:
            raise EngineError(f"this server cannot pause, abort requests or load weights: {self.capabilities.why_not}")
