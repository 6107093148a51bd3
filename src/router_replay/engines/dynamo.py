"""Connects to a Dynamo frontend by URL: `/v1/completions` with token ids both ways, and routes under `nvext`.

    with DynamoEngine("http://127.0.0.1:8000", spec, workers=["http://127.0.0.1:8081"]) as engine: ...

The frontend only generates; it cannot abort by name, pause, or load weights. Those calls go to the system servers of
the workers (`workers`; `/v1/rl/workers` on the discovery port lists them as `system_url`). Without workers, the
engine's weights are fixed. No tokenizer is needed: `nvext.completion_token_ids` contains the sampled tokens.

The code follows Dynamo's published contract; it was not run against a live Dynamo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from router_replay import wire
from router_replay.engines import checks
from router_replay.engines.backend import Backend, BrokenError, Flight, Progress
from router_replay.engines.base import WeightSource
from router_replay.engines.http import Http, TokenId, answer_limit, decoded, refusal
from router_replay.engines.remote import RemoteEngine
from router_replay.engines.stale import check_server
from router_replay.engines.types import Capabilities, Completion, Request
from router_replay.errors import EngineError, RouterReplayError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

_NO_FORCING = "Dynamo's /v1/completions has no field that sends routes to the engine, so routes cannot be forced"
_NO_WORKERS = "no workers= were given, and only the workers can hold requests and load weights"


class DynamoEngine(RemoteEngine):
    """Connects to one Dynamo frontend at `url`. `model` may be omitted if the frontend serves only one model.

    `spec` describes the routers of its model. `workers` are the URLs of the workers' system servers, which load
    weights and hold requests. `version` is the policy version of the weights that the workers have now. `timeout`
    limits one generation or weight update, in seconds. `api_key` is sent to the frontend and to the workers;
    `vocabulary` is the vocabulary size, if known.

    `settings` are the workers' engine arguments, if the caller knows them. Arguments that make rows stale (KV offload,
    a KV connector, context or pipeline parallel, prefill/decode) are refused here, because the frontend does not
    report them. `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for 64 consecutive tokens.
    """

    server = "Dynamo"

    def __init__(
        self,
        url: str,
        spec: RouterSpec,
        *,
        model: str | None = None,
        workers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        version: int = 0,
        timeout: float = 3600.0,
        api_key: str | None = None,
        vocabulary: int | None = None,
        allow_zero_layers: bool = False,
    ) -> None:
        given, seconds = checks.vocabulary(vocabulary), checks.seconds(timeout, "timeout")

        async def connect() -> Backend:
            backend = DynamoBackend(Http(url, seconds, self.server, api_key=api_key), spec, given)
            return await backend.connect(
                model, settings or {}, lambda worker: Http(worker, seconds, "Dynamo worker", api_key=api_key), workers
            )

        super().__init__(connect, version, allow_zero_layers=allow_zero_layers)


class DynamoBackend(Backend):
    """Implements the calls to a Dynamo frontend and its workers."""

    def __init__(self, http: Http, spec: RouterSpec, vocabulary: int | None) -> None:
        self._http = http
        self.spec = spec
        self.vocabulary = vocabulary
        self._model: str | None = None
        self._workers: list[Http] = []
        self._calls: dict[str, list[asyncio.Task[Completion]]] = {}

    async def connect(
        self,
        model: str | None,
        settings: Mapping[str, Any],
        to_worker: Callable[[str], Http],
        workers: Sequence[str],
    ) -> DynamoBackend:
        """Query what the frontend serves. Raises EngineError with the reason if it cannot be used."""
        try:
            for url in workers:  # one by one, so that a bad URL does not leave other connections open
                self._workers.append(to_worker(url))
            check_server(settings, server=f"the workers of {self._http.url}")
            await self._look(model)
        except BaseException:
            await self.close()
            raise
        return self

    async def _look(self, model: str | None) -> None:
        listed = await self._http.expect("GET", "/v1/models", repeat=True)
        try:
            served = [model["id"] for model in listed["data"]]
        except (KeyError, TypeError) as error:
            came = str(listed)[:200]
            raise EngineError(
                f"{self._http.url}/v1/models: expected a list of models, got {came}. Is this Dynamo?"
            ) from error
        self._model = served[0] if model is None and len(served) == 1 else model
        if self._model not in served:
            raise EngineError(
                f"{self._http.url} serves the models {served}, not {self._model!r}: pass model= with one of them"
            )
        lacks = [_NO_FORCING, *([] if self._workers else [_NO_WORKERS])]
        self.capabilities = Capabilities(
            routes=True, forced_routes=False, start=True, versions=bool(self._workers), why_not="; ".join(lacks)
        )

    # -- generating -----------------------------------------------------------------------------

    async def generate(self, flight: Flight) -> list[Completion]:
        """Generate each sample by a separate call, because `nvext` holds the tokens and rows of one choice only."""
        assert self._model is not None
        calls = [asyncio.ensure_future(self._sample(flight, index)) for index in range(flight.request.sampling.n)]
        self._calls[flight.names[0]] = calls
        try:
            return await asyncio.gather(*calls)
        except asyncio.CancelledError:
            if flight.stopped:  # by `stop` below; the frontend never sent the partial output
                return Completion.nothing(flight.request, self.spec)
            raise
        finally:
            del self._calls[flight.names[0]]
            for call in calls:
                call.cancel()

    async def _sample(self, flight: Flight, index: int) -> Completion:
        request = flight.request
        body = completions_body(request, index, str(self._model), flight.version)
        limit = answer_limit(request, self.spec, samples=1)
        status, answer = await self._http.request("POST", "/v1/completions", body, patient=True, limit=limit)
        if status != 200:
            raise refusal(f"{request.id}: {self._http.url}", status, answer)
        return completion_of(answer, request, index, self.spec, flight.version, self.vocabulary)

    async def stop(self, flights: Sequence[Flight]) -> None:
        """Close the connections, which makes the frontend cancel the requests in its workers."""
        for flight in flights:
            for call in self._calls.get(flight.names[0], []):
                call.cancel()

    # -- holding and loading, at the workers ----------------------------------------------------

    async def hold(self, kept: Sequence[Flight]) -> None:
        """Pause all workers. Raises EngineError if there are requests in `kept` and no workers."""
        if kept and not self._workers:
            raise EngineError(
                f"in_flight='keep' is not possible: {_NO_WORKERS}. Pass workers=, or in_flight='abort' or 'wait'"
            )
        # Without workers nothing is held: this engine's requests have ended, and new ones wait until it resumes.
        await self._tell("pause_generation", {"mode": "keep", "clear_cache": False})

    async def go(self) -> None:
        """Resume all workers."""
        await self._tell("resume_generation", {})

    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load a folder in every worker. No request may be kept, because answers do not say which weights they used."""
        if not self._workers:
            raise EngineError(
                f"weights cannot be loaded: {_NO_WORKERS}. Pass workers= with the URLs of their system servers"
            )
        if kept:
            raise EngineError(
                "in_flight='keep' would mix two policies in one answer, and Dynamo does not say which tokens come from "
                "which: pass in_flight='abort' or 'wait'"
            )
        try:
            await self._tell("update_weights_from_disk", {"model_path": str(source), "weight_version": str(version)})
        except EngineError as error:
            raise BrokenError(
                f"not every worker loaded {source}, so the workers may serve different weights: {error}. Restart the "
                "workers, then create a new engine"
            ) from error
        return {}

    async def _tell(self, route: str, body: dict[str, Any]) -> None:
        """Send a command to all workers and check the JSON answers: a worker can report a failure with status 200."""
        calls = (worker.expect("POST", f"/engine/{route}", body, patient=True) for worker in self._workers)
        answers = await asyncio.gather(*calls)
        for worker, answer in zip(self._workers, answers, strict=True):
            if not isinstance(answer, dict) or answer.get("status") != "ok":
                came = str(answer)[:300]
                raise EngineError(f"{worker.url}/engine/{route}: expected status 'ok', got {came}")

    async def close(self) -> None:
        """Close the connections to the frontend and to the workers."""
        await asyncio.gather(self._http.close(), *(worker.close() for worker in self._workers))


def completions_body(request: Request, index: int, model: str, version: int) -> dict[str, Any]:
    """Return the JSON body of the request for one sample."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": [int(token) for token in request.token_ids],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 1,
        "ignore_eos": sampling.ignore_eos,
        "stream": False,
        "nvext": {
            "extra_fields": ["completion_token_ids", "routed_experts"],
            "routed_experts_prompt_start": prompt_start(request.start, len(request.token_ids)),
            "cache_salt": f"router-replay-{version}",  # never reuse KV of older weights
        },
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed + index
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


def prompt_start(start: int, prompt_tokens: int) -> int:
    """Clamp `start` to [0, prompt_tokens], as Dynamo does."""
    return max(0, min(start, prompt_tokens))


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Nvext(msgspec.Struct):
    completion_token_ids: list[TokenId] | None = None
    routed_experts: dict[str, Any] | str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    nvext: _Nvext | None = None


def completion_of(
    body: bytes, request: Request, index: int, spec: RouterSpec, version: int, vocabulary: int | None = None
) -> Completion:
    """Parse and check the answer for one sample. Raises EngineError if it is invalid."""
    answer = decoded(body, _Answer, f"{request.id}: Dynamo's answer")
    if len(answer.choices) != 1:
        raise EngineError(
            f"{request.id}: expected one choice, since nvext has the rows of one, got {len(answer.choices)}"
        )
    [choice], nvext, prompt = answer.choices, answer.nvext or _Nvext(), len(request.token_ids)
    if choice.index != 0:
        raise EngineError(f"{request.id}: expected index 0 of the only choice, got {choice.index}")
    if nvext.completion_token_ids is None:
        raise EngineError(
            f"{request.id}: the answer has no nvext.completion_token_ids: this Dynamo is too old to return token ids, "
            "install a newer one"
        )
    tokens = nvext.completion_token_ids
    logprobs = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
    if len(logprobs) != len(tokens) or None in logprobs:
        raise EngineError(
            f"{request.id}: expected a log-prob for each of {len(tokens)} tokens, got {str(logprobs)[:200]}"
        )
    routes, start = _rows(nvext.routed_experts, spec, prompt, request) if tokens else (None, None)
    return Completion.assemble(
        request,
        index,
        spec=spec,
        token_ids=tokens,
        logprobs=np.asarray(logprobs, np.float32),
        routes=routes,
        start=start,
        versions=version,
        finish_reason="abort" if choice.finish_reason == "cancelled" else choice.finish_reason,
        vocabulary=vocabulary,
    )


def _rows(value: dict[str, Any] | str | None, spec: RouterSpec, prompt: int, request: Request) -> tuple[Routes, int]:
    """Return the rows and the position of the first row.

    With SGLang workers, Dynamo forwards SGLang's own text, which does not contain a start position.
    """
    if value is None:
        raise EngineError(
            f"{request.id}: the answer has no nvext.routed_experts: start the workers with "
            "--enable-return-routed-experts (TensorRT-LLM workers do not support it)"
        )
    try:  # CaptureWatch counts zero layers over all answers
        if isinstance(value, str):
            return wire.from_sglang(value, spec, allow_zero_layers=True), 0
        rows = wire.from_dynamo(value, spec, prompt_length=prompt, allow_zero_layers=True)
        start = wire.peer_start(value)
    except RouterReplayError as error:
        raise EngineError(f"{request.id}: {error}") from error
    if start != request.start:
        raise EngineError(
            f"{request.id}: expected rows from position {request.start} on, got rows from {start} on: these workers do "
            "not support nvext.routed_experts_prompt_start, so leave start out"
        )
    return rows, start
