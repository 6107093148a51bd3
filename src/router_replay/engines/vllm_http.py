"""A vLLM server, ours or a user's own, by its URL: `/inference/v1/generate`, tokens in and tokens out.

    with VllmHttpEngine("http://127.0.0.1:8000") as engine:
        print(engine.capabilities.why_not)      # what this server cannot do, found out when connecting

`http.py` says what is repeated and what is an EngineError; what was half received is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from router_replay import wire
from router_replay.engines.base import Capabilities, InFlight
from router_replay.engines.http import Http, message_of
from router_replay.engines.vllm_client import Transport, VllmClient
from router_replay.engines.vllm_samples import (
    Flight,
    Sample,
    end_of_sequence_ids,
    refuse_version,
    sampling_arguments,
)
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

GENERATE = "/inference/v1/generate"


class VllmHttpEngine(VllmClient):
    """A client of one server. `timeout` is for one request in seconds; `spec` is needed where the plugin is missing.

    `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for 64 tokens on end.
    """

    def __init__(
        self,
        url: str,
        *,
        version: int = 0,
        spec: RouterSpec | None = None,
        timeout: float = 3600.0,
        allow_zero_layers: bool = False,
    ) -> None:
        super().__init__(_connect(url.rstrip("/"), spec, timeout), version, allow_zero_layers=allow_zero_layers)


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    routed_experts: str | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]


def samples_of(body: bytes, spec: RouterSpec) -> list[Sample]:
    """The choices of a generate response, or EngineError where it is not one."""
    try:
        response = msgspec.json.decode(body, type=_Response)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the server's answer to {GENERATE} was not understood: {error}") from error
    samples = []
    for choice in response.choices:
        content = (choice.logprobs.content if choice.logprobs else None) or []
        rows = None
        if choice.routed_experts is not None:
            rows = wire.from_vllm(choice.routed_experts, spec, allow_zero_layers=True)  # CaptureWatch counts them
        logprobs = [token.logprob for token in content]
        samples.append(Sample(choice.index, choice.token_ids or [], logprobs, rows, choice.finish_reason))
    return samples


async def _connect(url: str, spec: RouterSpec | None, timeout: float) -> Transport:
    http = Http(url, timeout, "vLLM", "router-replay serve MODEL starts one")
    try:
        version = (await http.expect("GET", "/version")).get("version", "unknown")
        refuse_version(version)
        status, _ = await http.request("POST", GENERATE, {})
        if status in (404, 405):
            raise EngineError(f"{url} has no {GENERATE}: start it with --enable-scale-out, or by router-replay serve")
        return await _probe(http, spec)
    except BaseException:
        await http.close()
        raise


async def _probe(http: Http, spec: RouterSpec | None) -> Transport:
    """What this server can do, and why not the rest."""
    status, answer = await http.request("POST", "/collective_rpc", {"method": "router_replay_report"})
    if status == 200:
        [report, *_] = json.loads(answer)["results"]
        config = json.loads(report["config"])
        generation = json.loads(report["generation_config"])
        capabilities = Capabilities(
            routes=report["captures"],
            forced_routes=report["forced_routes"],
            prompt_start=True,
            logprobs=True,
            versions=True,
            why_not=report["reason"] or ("" if report["captures"] else _NO_CAPTURE),
        )
        found = RouterSpec.from_config(config)
        if spec is not None and spec != found:
            raise EngineError(f"the server's model is {found}, the spec that was given is {spec}")
        stops = end_of_sequence_ids(generation) or end_of_sequence_ids(config)
        return _OverHttp(http, found, capabilities, report["logprobs_mode"], stops)
    if status == 404:
        reason = (
            "the server is not in development mode (VLLM_SERVER_DEV_MODE=1), so it can neither pause nor take weights"
        )
    else:
        reason = "the plugin is not active on the server (ROUTER_REPLAY_VLLM=1, and router-replay installed there)"
    if spec is None:
        raise EngineError(
            f"{reason}, and so it does not say what its model is: pass spec=RouterSpec.from_config(config), "
            "or start the server by router-replay serve"
        )
    bare = _OverHttp(http, spec, Capabilities(True, False, True, True, False, reason), "raw_logprobs", ())
    if not await bare.captures():
        bare.capabilities = Capabilities(False, False, True, True, False, f"{_NO_CAPTURE}; {reason}")
    return bare


_NO_CAPTURE = "the server was started without --enable-return-routed-experts"


class _OverHttp(Transport):
    def __init__(
        self, http: Http, spec: RouterSpec, capabilities: Capabilities, logprobs_mode: str, stops: tuple[int, ...]
    ) -> None:
        self._http = http
        self.spec = spec
        self.capabilities = capabilities
        self.logprobs_mode = logprobs_mode
        self._end_of_sequence = stops

    async def captures(self) -> bool:
        """Does one generated token come back with a row?"""
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}
        answer = await self._http.expect("POST", GENERATE, body)
        return answer["choices"][0].get("routed_experts") is not None

    async def generate(self, flight: Flight) -> list[Sample]:
        request = flight.request
        body = {
            "request_id": flight.name,
            "token_ids": list(map(int, request.token_ids)),
            "sampling_params": sampling_arguments(request, self._end_of_sequence, as_text=True),
            "cache_salt": flight.salt,
        }
        status, answer = await self._http.request("POST", GENERATE, body)
        if status != 200:
            raise EngineError(f"{request.id}: the server answered {status}: {message_of(answer)}")
        return samples_of(answer, self.spec)

    async def abort(self, names: Sequence[str]) -> None:
        self._refuse_bare()
        ids = [f"generate-tokens-{name}" for name in names]  # the server's own prefix for this route
        await self._http.expect("POST", "/abort_requests", {"request_ids": ids})

    async def pause(self, mode: InFlight) -> None:
        self._refuse_bare()
        await self._http.expect("POST", "/pause", query={"mode": mode, "clear_cache": "false"})

    async def resume(self) -> None:
        self._refuse_bare()
        await self._http.expect("POST", "/resume")

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        self._refuse_bare()
        answer = await self._http.expect("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"])

    async def reset_prefix_cache(self) -> bool:
        answer = await self._http.expect("POST", "/reset_prefix_cache")
        return bool(answer.get("success"))

    async def close(self) -> None:
        await self._http.close()

    def _refuse_bare(self) -> None:
        if not self.capabilities.versions:
            raise EngineError(f"this server cannot be paused, aborted or given weights: {self.capabilities.why_not}")
