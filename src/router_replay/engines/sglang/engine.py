"""Connects to an SGLang server by URL: `/generate`, tokens in and tokens out, with the routes of every sample.

    with SglangEngine("http://127.0.0.1:30000") as engine:
        print(engine.capabilities.why_not)      # what this server cannot do, found out when connecting

The server must be started with --enable-return-routed-experts. Each sample of a request is sent separately, so that it
has its own rows and can be aborted by its own name. `extra_key`, the name of the policy version, separates KV of older
weights: SGLang includes it in the keys of its prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from router_replay.engines import checks
from router_replay.engines.backend import Backend, BrokenError, Flight, Progress
from router_replay.engines.base import WeightSource
from router_replay.engines.http import FIRST_PAUSE, Http, answer_limit, message_of, parsed, printable, refusal
from router_replay.engines.prefill_decode import without_prompt_rows
from router_replay.engines.remote import RemoteEngine
from router_replay.engines.sglang.answers import completion_of
from router_replay.engines.stale import Role, check_server
from router_replay.engines.types import Capabilities, Completion, Request
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

TESTED = "0.5.23"
BREATH = 0.05  # seconds that the paused scheduler runs; short, because requests of other clients run too
FLUSHES = 6  # attempts, with growing pauses: a request that is just ending still holds its blocks
NOT_FLUSHED = "cache was not flushed"
UNTOUCHED = ("Failed to get model loader", "Failed to get weights iterator")  # before the first weight is written
_NO_CAPTURE = "the server was started without --enable-return-routed-experts"
_NO_FORCING = "SGLang cannot force routes: it has no hook between its router and its kernels"


class SglangEngine(RemoteEngine):
    """Connects to one SGLang server at `url`. `version` is the policy version of the weights that it has now.

    `timeout` limits one generation or weight update, in seconds; `api_key` is the server's API key.
    `spec` is read from the server's model folder if that is on this machine, and must be given otherwise.
    `vocabulary`, the vocabulary size, is read in the same way, but may be omitted.
    `role` is for a server of a prefill/decode pair; see engines.prefill_decode.
    `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for 64 consecutive tokens.
    """

    server = "SGLang"

    def __init__(
        self,
        url: str,
        spec: RouterSpec | None = None,
        *,
        version: int = 0,
        timeout: float = 3600.0,
        role: Role = "whole",
        api_key: str | None = None,
        vocabulary: int | None = None,
        allow_zero_layers: bool = False,
    ) -> None:
        given, seconds = checks.vocabulary(vocabulary), checks.seconds(timeout, "timeout")

        async def connect() -> Backend:
            return await SglangBackend(Http(url, seconds, self.server, api_key=api_key), role, given).connect(
                spec, self.version
            )

        super().__init__(connect, version, allow_zero_layers=allow_zero_layers)


class SglangBackend(Backend):
    """Implements the calls to an SGLang server."""

    def __init__(self, http: Http, role: Role, vocabulary: int | None) -> None:
        self._http = http
        self._role = role
        self.vocabulary = vocabulary
        self._names: dict[str, int] = {}  # the policy version of each name on the server
        self._name = ""
        self._seeds = False

    async def connect(self, given: RouterSpec | None, version: int) -> SglangBackend:
        """Query what the server can do. Raises EngineError with the reason if it cannot be used."""
        try:
            await self._look(given, version)
        except BaseException:
            await self.close()
            raise
        return self

    async def _look(self, given: RouterSpec | None, version: int) -> None:
        info = await self._info("/server_info", "/get_server_info")
        check_server(info, self._role, self._http.url)
        model = await self._info("/model_info", "/get_model_info")
        self.spec, found = _model(model, given, self._http.url)
        self.vocabulary = checks.same_vocabulary(self.vocabulary, found)
        self._name = str(model.get("weight_version") or "default")
        self._names[self._name] = version
        self._seeds = bool(info.get("enable_deterministic_inference"))
        captures = bool(info.get("enable_return_routed_experts"))
        lacks = [] if captures else [_NO_CAPTURE]
        lacks.append(_NO_FORCING)
        if info.get("version") != TESTED:
            lacks.append(f"SGLang {printable(str(info.get('version'))[:40])} was not tested, only {TESTED}")
        self.capabilities = Capabilities(
            routes=captures, forced_routes=False, start=captures, versions=True, seeds=self._seeds,
            why_not="; ".join(lacks),
        )  # fmt: skip

    async def _info(self, path: str, older: str) -> dict[str, Any]:
        status, answer = await self._http.request("GET", path, repeat=True)
        if status == 404:
            path = older
            status, answer = await self._http.request("GET", path, repeat=True)
        if status != 200:
            raise refusal(f"{self._http.url}{path} (is this SGLang?)", status, answer)
        info = parsed(answer, self._http.url + path)
        if not isinstance(info, dict):
            came = str(info)[:200]
            raise EngineError(f"{self._http.url}{path}: expected a JSON object, got {came}. Is this SGLang?")
        return info

    # -- generating -----------------------------------------------------------------------------

    def refuse(self, request: Request) -> None:
        """Raise EngineError for a seed or stop tokens that this server would ignore."""
        if request.sampling.seed is not None and not self._seeds:
            raise EngineError(
                f"{request.id}: the seed is {request.sampling.seed}, but this server ignores seeds: start it with "
                "--enable-deterministic-inference, or leave the seed out"
            )
        if request.sampling.ignore_eos and request.sampling.stop_token_ids:
            raise EngineError(
                f"{request.id}: SGLang ignores stop tokens if ignore_eos is set, so stop_token_ids "
                f"{request.sampling.stop_token_ids} would have no effect: leave one of the two out"
            )

    async def generate(self, flight: Flight) -> list[Completion]:
        """Generate each sample by a separate call, so that it has its own rows."""
        samples = [asyncio.ensure_future(self._sample(flight, index)) for index in range(flight.request.sampling.n)]
        try:
            return await asyncio.gather(*samples)
        finally:
            for sample in samples:  # one failed: close the other connections, so that SGLang aborts them
                sample.cancel()

    async def _sample(self, flight: Flight, index: int) -> Completion:
        request = flight.request
        body = generate_body(request, index, flight.names[index], self._name, self.capabilities.routes)
        limit = answer_limit(request, self.spec, samples=1)
        status, answer = await self._http.request("POST", "/generate", body, patient=True, limit=limit)
        if status != 200:
            raise refusal(f"{request.id}: {self._http.url}/generate", status, answer)
        routes, vocabulary = self.capabilities.routes, self.vocabulary
        completion = completion_of(answer, request, index, self.spec, flight.version, self._names, routes, vocabulary)
        return without_prompt_rows(completion, len(request.token_ids)) if self._role == "decode" else completion

    async def stop(self, flights: Sequence[Flight]) -> None:
        """Ask the server to abort every sample of these requests."""
        names = [name for flight in flights for name in flight.names]
        await asyncio.gather(
            *(self._http.expect("POST", "/abort_request", {"rid": name}, repeat=True) for name in names)
        )

    # -- holding and loading --------------------------------------------------------------------

    async def hold(self, kept: Sequence[Flight]) -> None:
        """Pause the server in place, so that kept requests keep their KV and their rows."""
        # Never use "retract": after a weight swap, rows of a retracted request are not those that sampled its tokens.
        await self._http.expect("POST", "/pause_generation", {"mode": "in_place"}, repeat=True, patient=True)

    async def go(self) -> None:
        """Let the server continue."""
        await self._http.expect("POST", "/continue_generation", {}, repeat=True, patient=True)

    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load a folder that the server can read, under a version name that it never had before."""
        name = str(version) if str(version) not in self._names else f"{version}.{len(self._names)}"
        body = {"model_path": str(source), "weight_version": name, "flush_cache": not kept}
        try:
            status, raw = await self._http.request("POST", "/update_weights_from_disk", body, patient=True)
            answer = parsed(raw, f"{self._http.url}/update_weights_from_disk")
        except EngineError as error:
            raise BrokenError(
                f"the update with {source} got no valid answer, so it is unknown which weights the server has: {error}"
                ". Restart the server, then create a new engine"
            ) from error
        text = str(answer.get("message", answer)) if isinstance(answer, dict) else str(answer)
        loaded = status == 200 and isinstance(answer, dict) and answer.get("success") is True
        if not loaded and NOT_FLUSHED not in text:
            problem = f"{self._http.url} did not load {source}: {text[:500]}"
            if not text.startswith(UNTOUCHED):
                # SGLang's roll-back reads the new folder again, so "rolled back" does not mean the old weights.
                raise BrokenError(
                    f"{problem}. It is unknown which weights it has now: restart the server, then create a new engine"
                )
            raise EngineError(problem)
        if not loaded:
            await self._finish(str(source), name)
        self._names[name] = version
        self._name = name
        return {}  # not needed: each answer says which weights sampled its tokens

    async def _finish(self, source: str, name: str) -> None:
        """Complete an update after the new weights are loaded.

        A failure here leaves a server that reports the new weights under the old version name.
        """
        try:
            await self._flush(source)
            # SGLang's front end kept the old name, because the flush was refused.
            body = {"new_version": name, "abort_all_requests": False}
            await self._http.expect("POST", "/update_weight_version", body, patient=True)
        except BrokenError:
            raise
        except EngineError as error:
            raise BrokenError(
                f"{self._http.url} loaded {source}, but could not flush its cache and set the version name: {error}. "
                "Restart the server, then create a new engine"
            ) from error

    async def _flush(self, source: str) -> None:
        """Flush the KV and rows of the old weights: SGLang reports a successful load even if it did not flush."""
        pause, text = FIRST_PAUSE, ""
        for attempt in range(FLUSHES):
            status, answer = await self._http.request("POST", "/flush_cache", repeat=True, patient=True)
            if status == 200:
                return
            text = message_of(answer)
            if attempt == 0:
                await self._breathe()
            await asyncio.sleep(pause)
            pause *= 2
        raise BrokenError(
            f"{self._http.url} loaded {source}, but did not flush its cache in {FLUSHES} attempts ({text.strip()}): "
            "requests of other clients use KV of the old weights. Restart the server, use it with one engine only, and "
            "create a new engine"
        )

    async def _breathe(self) -> None:
        """Let the scheduler run for a moment.

        A request that ended just before the pause is still in the scheduler, and counts as running until the next
        pass. Requests of this engine do not start meanwhile.
        """
        await self.go()
        await asyncio.sleep(BREATH)
        await self.hold(())

    async def ping(self) -> None:
        """Raise EngineError unless the server says that it is well."""
        await self._http.ping()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def generate_body(request: Request, index: int, name: str, version: str, routes: bool) -> dict[str, Any]:
    """Return the JSON body of the request for one sample."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,  # explicit, so that a server's preferred parameters do not change the distribution
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,  # the stop token was sampled by the policy and has a log-prob
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed + index
    return {
        "rid": name,
        "input_ids": [int(token) for token in request.token_ids],
        "sampling_params": parameters,
        "return_logprob": True,
        "return_routed_experts": routes,
        "routed_experts_start_len": request.start if routes else 0,
        "extra_key": f"router-replay-{version}",
        "stream": False,
    }


def _model(model: dict[str, Any], given: RouterSpec | None, url: str) -> tuple[RouterSpec, int | None]:
    """Return the router spec and the vocabulary size (None if unknown) of the server's model."""
    path = model.get("model_path")
    config = pathlib.Path(path if isinstance(path, str) and path.isprintable() else "") / "config.json"
    if not path or not config.is_file():
        if given is None:
            raise EngineError(
                f"the model of {url} is {path!r}, which is not a folder of this machine, so its routers are unknown: "
                "pass spec=RouterSpec.from_config(config)"
            )
        return given, None
    told = json.loads(config.read_text())
    found = RouterSpec.from_config(told)
    if given is not None and given != found:
        raise EngineError(f"the model of {url} has {found}, but spec={given} was given")
    return found, checks.vocabulary_of(told)
