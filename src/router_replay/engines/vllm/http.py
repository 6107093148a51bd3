"""Connects to a vLLM server by URL, with or without our plugin: token ids in, token ids and routes out.

    with VllmHttpEngine("http://127.0.0.1:8000", spec=spec) as engine:
        print(engine.capabilities.why_not)      # what this server cannot do, found out when connecting

Every server captures. The plugin adds forced routes, checked weights and the versions of kept requests; vLLM's
development mode adds pauses that keep requests, and aborts that return what was sampled, and on GPUs vLLM's own weight
transfers (`stock.py`). `engines/http.py` describes which calls are retried and which failures raise EngineError;
partially received answers are discarded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router_replay.engines import checks
from router_replay.engines.backend import Flight
from router_replay.engines.http import Http, answer_limit, checked_url, decoded, parsed, printable, refusal
from router_replay.engines.stale import check_server
from router_replay.engines.types import Capabilities, InFlight, Request, Sampling
from router_replay.engines.vllm.client import Transport, VllmBackend, VllmClient
from router_replay.engines.vllm.plugin import SIGN
from router_replay.engines.vllm.reports import NO_CAPTURE, PluginReport, ServedModel, read_report
from router_replay.engines.vllm.requests import end_of_sequence_ids
from router_replay.engines.vllm.samples import Sample
from router_replay.engines.vllm.stock import Stock, StockBackend, current_gpu, read_stock
from router_replay.engines.vllm.token_routes import (
    COMPLETIONS_CUT_ROWS,
    GENERATE_COLLECTS,
    CompletionsRoute,
    GenerateRoute,
    TokenRoute,
)
from router_replay.engines.vllm.token_routes import GENERATE as GENERATE
from router_replay.engines.vllm.token_routes import samples_of as samples_of
from router_replay.engines.vllm.versions import SECOND_RUNNER, numbers_of, refuse_version
from router_replay.errors import EngineError, RouterReplayError
from router_replay.spec import RouterSpec

WORKERS_LIMIT = 64 << 20  # bytes: each of many workers reports the progress of thousands of requests
NOBODY = "router-replay-nobody"  # aborting this unknown request shows whether a server has the call
ABORTS = ("/abort_requests", "/inference/v1/abort_requests")  # in development mode, and from 0.32 with scale-out


class VllmHttpEngine(VllmClient):
    """Connects to one vLLM server at `url`. `version` is the policy version of the weights that it has now.

    `timeout` limits one generation or weight update, in seconds; `api_key` is the server's API key. A stock server
    gets new weights from the GPU that is current for the caller.
    `spec` is required if the server lacks the plugin and its model is not a folder of this machine; `vocabulary`, the
    vocabulary size, is optional there. `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for
    64 consecutive tokens.
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
        gpu = current_gpu()  # of the caller's thread; the engine has a thread of its own
        super().__init__(
            lambda: _connect(address, spec, given, seconds, api_key, gpu), version, allow_zero_layers=allow_zero_layers
        )


# -- connecting ---------------------------------------------------------------------------------------


class _Reports(msgspec.Struct):
    results: list[PluginReport]


class _WorldSize(msgspec.Struct):
    world_size: int


class _Model(msgspec.Struct):
    """Holds the fields of a model in /v1/models that are used here."""

    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclasses.dataclass(frozen=True)
class _Found:
    """Holds what was found out about a server before its plugin was asked."""

    http: Http
    version: tuple[int, ...]
    model: _Model
    route: TokenRoute
    gpu: int


async def _connect(
    url: str, spec: RouterSpec | None, vocabulary: int | None, timeout: float, api_key: str | None, gpu: int
) -> Transport:
    http = Http(url, timeout, "vLLM", "Start one with: router-replay serve MODEL", api_key=api_key)
    try:
        version = str((await http.expect_object("GET", "/version")).get("version", "unknown"))[:40]
        refuse_version(version)
        return await _probe(await _look(http, numbers_of(version), gpu), spec, vocabulary)
    except BaseException:
        await http.close()
        raise


async def _look(http: Http, version: tuple[int, ...], gpu: int) -> _Found:
    """Find out which route for token ids the server has, and what it tells about its model."""
    status, answer = await http.request("GET", "/v1/models", repeat=True)
    if status in (401, 403):
        raise refusal(f"{http.url}/v1/models", status, answer)
    models = decoded(answer, _Models, f"the answer of {http.url}/v1/models").data if status == 200 else []
    model = models[0] if models else _Model()
    status, _ = await http.request("POST", GENERATE, {})
    route: TokenRoute = GenerateRoute(collects=version >= GENERATE_COLLECTS)
    if status in (403, 404, 405):  # vLLM 0.32 says 403 without --enable-scale-out; a wrong key was refused above
        route = CompletionsRoute(cuts_rows=version >= COMPLETIONS_CUT_ROWS, context=model.max_model_len)
    return _Found(http, version, model, route, gpu)


async def _probe(found: _Found, spec: RouterSpec | None, vocabulary: int | None) -> Transport:
    """Find out what the server can do, and the reasons for what it cannot, and return a transport for it."""
    http, place = found.http, f"{found.http.url}/collective_rpc"
    reason = "the plugin is not active on the server (it needs router-replay installed there, and ROUTER_REPLAY_VLLM=1)"
    if await _must_not_ask(http):
        return await _without_plugin(found, spec, vocabulary, reason)
    body = {"method": "router_replay_report"}
    status, answer = await http.request("POST", "/collective_rpc", body, limit=WORKERS_LIMIT)
    if status in (401, 403):
        raise refusal(place, status, answer)
    if status == 404:
        reason = "the server is not in development mode (VLLM_SERVER_DEV_MODE=1), where the plugin answers"
    elif status == 200:
        reports = decoded(answer, _Reports, f"the answer of {place}").results
        if not reports:
            raise EngineError(f"{place}: expected the report of at least one worker, got none")
        inactive = [report.reason for report in reports if not report.active]
        if not inactive:
            return await _with_plugin(found, reports, spec, vocabulary)
        reason = printable(inactive[0][:2000])
    return await _without_plugin(found, spec, vocabulary, reason)


async def _must_not_ask(http: Http) -> bool:
    """Return whether the server has several workers and shows no sign of the plugin.

    A call that workers do not know would harm such a server: vLLM reads the first worker's error and leaves those of
    the others for the next call, which then fails. /server_info takes seconds, so a server with one worker is asked.
    """
    status, answer = await http.request("GET", "/get_world_size", repeat=True)
    place = f"the answer of {http.url}/get_world_size"
    if status != 200 or decoded(answer, _WorldSize, place).world_size == 1:
        return False
    query = {"config_format": "json"}
    status, answer = await http.request("GET", "/server_info", query=query, repeat=True, patient=True)
    told = parsed(answer, f"{http.url}/server_info") if status == 200 else None
    shown = told.get("vllm_env") if isinstance(told, dict) else None
    return not isinstance(shown, dict) or SIGN not in shown


async def _with_plugin(
    found: _Found, reports: Sequence[PluginReport], spec: RouterSpec | None, vocabulary: int | None
) -> Transport:
    http, place = found.http, f"{found.http.url}/collective_rpc"
    report = reports[0]  # all workers run one model with one command line
    model = read_report(report, place, spec, vocabulary)
    captures = all(report.captures for report in reports)
    reason = next((report.reason for report in reports if report.reason), "")
    capabilities = Capabilities(
        routes=captures,
        forced_routes=all(report.forced_routes for report in reports),
        start=True,
        versions=True,
        checked_weights=True,
        why_not=printable(reason[:2000]) or ("" if captures else NO_CAPTURE),
    )
    ranks = await _ranks(http)
    if len(reports) != ranks:
        raise EngineError(
            f"the server has {ranks} ranks, and {place} has the answers of {len(reports)}: the policy versions of the "
            "other ranks' requests would be unknown. A server whose data-parallel ranks are behind one URL needs the "
            "plugin of this release in its API server; a rank with its own URL cannot be used with the plugin"
        )
    return _OverHttp(found, model, capabilities, report.logprobs_mode, abort_path=ABORTS[0], ranks=ranks)


async def _ranks(http: Http) -> int:
    """Return the number of workers of all data-parallel and tensor-parallel ranks."""
    status, answer = await http.request("GET", "/get_world_size", repeat=True)
    if status != 200:
        raise refusal(f"{http.url}/get_world_size", status, answer)
    return decoded(answer, _WorldSize, f"the answer of {http.url}/get_world_size").world_size


async def _without_plugin(found: _Found, spec: RouterSpec | None, vocabulary: int | None, reason: str) -> Transport:
    config, generation_config = (_local(found.model.root, name) for name in ("config.json", "generation_config.json"))
    if config:
        read = RouterSpec.from_config(config)
        if spec is not None and spec != read:
            raise EngineError(
                f"the model of {found.http.url}, {found.model.root}, has {read}, but spec={spec} was given"
            )
        spec, vocabulary = read, checks.same_vocabulary(vocabulary, checks.vocabulary_of(config))
    if spec is None:
        raise EngineError(
            f"the routers of the server's model are unknown: {reason}, and {checks.shown(found.model.root)} is not a "
            "model folder of this machine. Pass spec=RouterSpec.from_config(config), or start the server with "
            "router-replay serve"
        )
    info, abort_path = await _server_info(found), await _abort_path(found.http)
    stock = read_stock(info, found.version, found.model.root, found.gpu)
    status, _ = await found.http.request("GET", "/is_paused", repeat=True)
    weights = "new weights and policy versions"
    if not stock.why_not:
        weights = "checked weights and requests that are kept over a weight change"
    no_plugin = f"forced routes, {weights} need the plugin: {reason}"
    lacks = [no_plugin]
    if stock.why_not:
        lacks.append(f"new weights by vLLM's own transfer: {stock.why_not}")
    if abort_path is None:
        lacks.append(_NO_ABORT)
    if status != 200:
        lacks.append(_NO_PAUSE)
    capabilities = Capabilities(
        routes=True,
        forced_routes=False,
        start=True,
        versions=not stock.why_not,
        cannot_keep=f"requests that are kept over a weight change need the plugin: {reason}",
        why_not="; ".join(lacks),
    )
    stops = end_of_sequence_ids(generation_config) or end_of_sequence_ids(config)
    model = ServedModel(spec, vocabulary, stops)
    logprobs_mode = str(info["settings"].get("logprobs_mode", "raw_logprobs"))
    bare = _OverHttp(found, model, capabilities, logprobs_mode, abort_path=abort_path)
    bare.no_plugin, bare.stock = no_plugin, stock
    bare.on_seeds = _SEEDS_ON_A_CPU if found.version < SECOND_RUNNER else ""
    bare.cannot_hold = _NO_PAUSE if status != 200 else ""
    if not await bare.captures():
        lacks.insert(0, NO_CAPTURE)
        bare.capabilities = dataclasses.replace(capabilities, routes=False, why_not="; ".join(lacks))
    return bare


async def _abort_path(http: Http) -> str | None:
    """Return the route that aborts requests by name, or None. An abort of an unknown request changes nothing."""
    for path in ABORTS:
        status, _ = await http.request("POST", path, {"request_ids": [NOBODY]})
        if status == 200:
            return path
    return None


async def _server_info(found: _Found) -> dict[str, Any]:
    """Return what the server tells of itself, with `settings` of all parts, and refuse those that return wrong rows.

    Only a server in development mode tells its settings. vLLM's defaults are assumed for others.
    """
    query = {"config_format": "json"}
    status, answer = await found.http.request("GET", "/server_info", query=query, repeat=True, patient=True)
    if status != 200:
        return {"settings": {}}
    told = parsed(answer, f"{found.http.url}/server_info")
    config = told.get("vllm_config", {}) if isinstance(told, dict) else None
    if not isinstance(config, dict):
        raise EngineError(f"{found.http.url}/server_info: expected an object vllm_config, got {str(config)[:200]}")
    settings = dict(config)
    for part in ("cache_config", "parallel_config", "model_config"):
        if isinstance(config.get(part), dict):
            settings |= config[part]
    check_server(settings, server=found.http.url, version=found.version)
    return {**told, "settings": settings}


def _local(folder: str | None, name: str) -> Mapping[str, Any]:
    """Return a JSON file of the model's folder, or nothing if the folder is not on this machine."""
    if not folder or not folder.isprintable():
        return {}
    path = pathlib.Path(folder) / name
    try:
        told = parsed(path.read_text(), str(path)) if path.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path}, a file of the model that the server names, cannot be read: {error}") from error
    if not isinstance(told, dict):
        raise EngineError(f"{path}: expected a JSON object, got {str(told)[:200]}")
    return told


_NO_ABORT = (
    "an abort returns nothing of what was sampled, since the server has no call for it (VLLM_SERVER_DEV_MODE=1, or "
    "--enable-scale-out from vLLM 0.32 on): it closes the connection, and the server drops the request"
)
_SEEDS_ON_A_CPU = (
    'If the server\'s log says "CPU Generator does not use offset", the cause is a seeded request: vLLM up to 0.30 on '
    "a CPU, without the plugin, ends if it computes the prompt of such a request in several steps. Start the server "
    "again, and leave out the seed, or start it with router-replay serve"
)
_NO_PAUSE = "a pause cannot keep requests, since the server has no /pause (VLLM_SERVER_DEV_MODE=1)"


# -- the transport ------------------------------------------------------------------------------------


class _OverHttp(Transport):
    def __init__(
        self,
        found: _Found,
        model: ServedModel,
        capabilities: Capabilities,
        logprobs_mode: str,
        *,
        abort_path: str | None,
        ranks: int = 1,
    ) -> None:
        self._http = found.http
        self._route = found.route
        self.spec = model.spec
        self.vocabulary = model.vocabulary
        self.capabilities = capabilities
        self.logprobs_mode = logprobs_mode
        self.no_plugin = ""  # why the server has no plugin; empty if it has
        self.on_seeds = ""  # what a seeded request can do to the server
        self.stock: Stock | None = None  # how a server without the plugin takes new weights
        self._end_of_sequence = model.end_of_sequence
        self._abort_path = abort_path
        self._ranks = ranks
        self._calls: dict[str, asyncio.Task[tuple[int, bytes]]] = {}

    async def captures(self) -> bool:
        """Generate one token, and return whether the answer has a row."""
        flight = Flight(Request((0,), Sampling(max_tokens=1, temperature=0.0)))
        flight.salt = flight.name
        status, answer = await self._send(flight)
        if status != 200:
            raise refusal(f"{self._http.url}{self._route.path}", status, answer)
        samples = self._route.samples(answer, flight.request, self.spec)
        return bool(samples) and samples[0].rows is not None

    async def generate(self, flight: Flight) -> list[Sample]:
        request = flight.request
        call = self._calls[flight.name] = asyncio.ensure_future(self._send(flight))
        try:
            status, answer = await call
        except asyncio.CancelledError:
            if flight.stopped:  # by `abort` below; what the server had sampled is lost
                return [Sample(index, (), (), None, "abort") for index in range(request.sampling.n)]
            raise
        finally:
            del self._calls[flight.name]
            call.cancel()
        if status != 200:
            error = refusal(f"{request.id}: the server", status, answer)
            seeded = status >= 500 and request.sampling.seed is not None and self.on_seeds
            raise EngineError(f"{error}. {self.on_seeds}") if seeded else error
        try:
            return self._route.samples(answer, request, self.spec)
        except RouterReplayError as error:
            raise EngineError(f"{request.id}: {error}") from error

    async def _send(self, flight: Flight) -> tuple[int, bytes]:
        body = self._route.body(flight, self._end_of_sequence)
        limit = answer_limit(flight.request, self.spec, samples=flight.request.sampling.n)
        return await self._http.request("POST", self._route.path, body, patient=True, limit=limit)

    async def abort(self, names: Sequence[str]) -> None:
        if self._abort_path is None:  # closing a connection makes the server drop its request
            for name in names:
                if name in self._calls:
                    self._calls[name].cancel()
            return
        ids = [self._route.server_name(name) for name in names]
        await self._http.expect("POST", self._abort_path, {"request_ids": ids})

    async def pause(self, mode: InFlight) -> None:
        await self._http.expect("POST", "/pause", query={"mode": mode, "clear_cache": "false"}, patient=True)

    async def resume(self) -> None:
        await self._http.expect("POST", "/resume", patient=True)

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        if self.no_plugin:
            raise EngineError(self.no_plugin)
        body = {"method": method, "kwargs": arguments}
        answer = await self._http.expect_object("POST", "/collective_rpc", body, patient=True, limit=WORKERS_LIMIT)
        results = answer.get("results")
        if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
            raise EngineError(
                f"{self._http.url}/collective_rpc: expected a JSON object from every worker, got {str(answer)[:200]}"
            )
        if len(results) != self._ranks:
            raise EngineError(f"expected the answers of {self._ranks} workers, got {len(results)}: {str(answer)[:200]}")
        return results

    async def reset_prefix_cache(self) -> bool:
        answer = await self._http.expect_object("POST", "/reset_prefix_cache", patient=True)
        return answer.get("success") is True

    async def ping(self) -> None:
        await self._http.ping()

    async def close(self) -> None:
        await self._http.close()

    def backend(self) -> VllmBackend:
        if self.stock is None:
            return VllmBackend(self)
        return StockBackend(self, self._http, self.stock, self.no_plugin)
