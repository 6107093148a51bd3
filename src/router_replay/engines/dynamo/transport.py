"""Implements the calls to a Dynamo frontend and its workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import uuid
from collections.abc import Sequence
from typing import Any

from router_replay import wire
from router_replay.engines.backend import Flight
from router_replay.engines.dynamo.completions import COMPLETIONS, completions_body, sample_of
from router_replay.engines.http import Http, answer_limit, message_of, parsed, refusal
from router_replay.engines.types import Capabilities, InFlight, Request
from router_replay.engines.vllm.client import Transport
from router_replay.engines.vllm.http import GENERATE, WORKERS_LIMIT, samples_of
from router_replay.engines.vllm.requests import sampling_arguments
from router_replay.engines.vllm.samples import Sample
from router_replay.errors import EngineError, RouterReplayError
from router_replay.spec import RouterSpec

NO_WORKERS = "no workers= were given, so requests can neither be held nor aborted by name, nor weights be loaded"
ABORTED = 499  # the generate route's answer to an aborted request, without its tokens
PLUGIN_ROUTE = "/engine/router_replay"  # engines/vllm/plugin/dynamo.py adds it
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclasses.dataclass(frozen=True)
class Found:
    """Holds what `connect` found out about a Dynamo.

    `generate`: the frontend has the generate route. `prompt_start`: its completions take the start of the rows.
    `plugin`: the workers have our plugin. `no_generate` and `no_weights` are the reasons for what is missing.
    """

    model: str
    spec: RouterSpec
    vocabulary: int | None
    end_of_sequence: tuple[int, ...] | None
    logprobs_mode: str
    capabilities: Capabilities
    generate: bool
    prompt_start: bool
    plugin: bool
    no_generate: str = ""
    no_weights: str = ""


class DynamoTransport(Transport):
    """Sends requests to the frontend and commands to every worker."""

    def __init__(self, frontend: Http, workers: Sequence[Http], found: Found) -> None:
        self.workers, self.found = list(workers), found
        self.spec, self.vocabulary, self.capabilities = found.spec, found.vocabulary, found.capabilities
        self.logprobs_mode = found.logprobs_mode
        self._frontend = frontend
        self._calls: dict[str, asyncio.Future[list[Sample]]] = {}

    # -- generating -----------------------------------------------------------------------------

    async def generate(self, flight: Flight) -> list[Sample]:
        """Generate all samples: by one call of the generate route, or else by one completion each."""
        if self.found.generate:
            calls = {flight.name: asyncio.ensure_future(self._generate(flight))}
        else:
            calls = {
                name: asyncio.ensure_future(self._complete(flight, index)) for index, name in enumerate(flight.names)
            }
        self._calls |= calls
        try:
            samples = [sample for call in await asyncio.gather(*calls.values()) for sample in call]
        except asyncio.CancelledError:
            if flight.stopped:  # by `abort` below, where no worker could be told; the partial answer never came
                return nothing(flight.request)
            raise
        finally:
            for name, call in calls.items():
                call.cancel()
                del self._calls[name]
        for sample in samples:
            sample.finish_reason = self._finish_reason(sample, flight)
            self._refuse_lost_rows(sample, flight)
        return samples

    async def _generate(self, flight: Flight) -> list[Sample]:
        request = flight.request
        body = {
            "model": self.found.model,
            "token_ids": list(map(int, request.token_ids)),
            "sampling_params": sampling_arguments(request, self.found.end_of_sequence or (), as_text=True),
            "cache_salt": flight.salt,
        }
        status, answer = await self._post(GENERATE, body, flight, 0, request.sampling.n)
        if status == ABORTED:
            return nothing(request)
        if status != 200:
            raise self._refusal(request, status, answer)

        def rows(value: Any, spec: RouterSpec, **options: Any) -> Any:
            if wire.peer_start(value) != request.start:
                start = wire.peer_start(value)
                raise EngineError(f"expected rows from position {request.start} on, got rows from {start} on")
            return wire.from_dynamo(value, spec, prompt_length=len(request.token_ids), **options)

        try:
            return samples_of(answer, self.spec, rows)
        except RouterReplayError as error:
            raise EngineError(f"{request.id}: {error}") from error

    async def _complete(self, flight: Flight, index: int) -> list[Sample]:
        request = flight.request
        body = completions_body(request, index, self.found.model, flight.salt, self.found.prompt_start)
        status, answer = await self._post(COMPLETIONS, body, flight, index, 1)
        if status != 200:
            raise self._refusal(request, status, answer)
        try:
            return [sample_of(answer, request, index, self.spec)]
        except RouterReplayError as error:
            raise error if isinstance(error, EngineError) else EngineError(f"{request.id}: {error}") from error

    async def _post(self, path: str, body: Any, flight: Flight, index: int, samples: int) -> tuple[int, bytes]:
        """Send a request; one that Dynamo turns away is sent again.

        Dynamo also answers 503 for a request whose worker died. It may be sent again from its start, but not after the
        weights changed under it: the new answer would be of the new weights alone.
        """
        return await self._frontend.request(
            "POST",
            path,
            body,
            headers={"x-dynamo-request-id": request_id(flight.names[index])},
            retry_if=lambda: not flight.swapped,
            patient=True,
            limit=answer_limit(flight.request, self.spec, samples=samples),
        )

    def _refusal(self, request: Request, status: int, answer: bytes) -> EngineError:
        error = refusal(f"{request.id}: {self._frontend.url}", status, answer)
        if status < 500:
            return error
        return EngineError(
            f"{error}. The frontend also answers this if a worker died while it computed the request; no part of the "
            "answer was used"
        )

    def _finish_reason(self, sample: Sample, flight: Flight) -> str | None:
        """Return how a sample ended. Dynamo says "stop" for aborted ones too; their last token is no stop token."""
        reason, sampling = sample.finish_reason, flight.request.sampling
        if reason in ("cancelled", "abort"):
            return "abort"
        if reason != "stop":
            return reason
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.found.end_of_sequence or ())}
        if len(sample.token_ids) and sample.token_ids[-1] in ends:
            return "stop"
        # The generate route says "stop" for requests that our plugin aborted, and for no other abort.
        return "abort" if flight.stopped or not self.found.generate else "stop"

    def _refuse_lost_rows(self, sample: Sample, flight: Flight) -> None:
        if not self.capabilities.routes or sample.rows is not None or not len(sample.token_ids) or flight.stopped:
            return
        raise EngineError(
            f"{flight.request.id}: {len(sample.token_ids)} tokens came without their experts, though this Dynamo "
            "captures them: vLLM up to 0.30 loses the rows of an answer when Dynamo reads two parts of it as one, "
            "which happens under load. Our plugin in the workers (ROUTER_REPLAY_VLLM=1) repairs it, and so does vLLM "
            "0.31; or send the request again"
        )

    # -- commands to the workers ----------------------------------------------------------------

    async def abort(self, names: Sequence[str]) -> None:
        """End these requests. One that a worker does not know yet is ignored there; the caller asks again."""
        if not self.workers:  # closing its connection makes the frontend cancel a request
            for name in names:
                if name in self._calls:
                    self._calls[name].cancel()
        elif self.found.plugin:
            await self._tell_all(PLUGIN_ROUTE, {"method": "abort", "request_ids": [request_id(name) for name in names]})
        else:
            for name in names:
                await self._tell_all("/engine/abort_request", {"request_id": request_id(name)})

    async def pause(self, mode: InFlight) -> None:
        """Pause all workers, or none if one of them refuses."""
        try:
            await self._tell_all("/engine/pause_generation", {"mode": mode, "clear_cache": False})
        except BaseException:
            with contextlib.suppress(EngineError):  # others may be paused already
                await self.resume()
            raise

    async def resume(self) -> None:
        """Resume all workers."""
        await self._tell_all("/engine/resume_generation", {})

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        """Call a method of the plugin in every worker. The reported progress of requests has our names."""
        if not self.found.plugin:
            raise EngineError(f"{method} needs the plugin in the workers: {self.found.no_weights}")
        answers = await self._tell_all(PLUGIN_ROUTE, {"method": method, "kwargs": arguments})
        results = [result for answer in answers for result in results_of(answer)]
        progress: dict[str, Any] = {}
        for result in results:  # each request ran in one of the workers
            reported = result.get("progress")
            progress |= reported if isinstance(reported, dict) else {}
        ours = {_UUID.sub(lambda found: flight_name(found[0]), name): rows for name, rows in progress.items()}
        return [{**result, "progress": ours} if "progress" in result else result for result in results]

    async def reset_prefix_cache(self) -> bool:
        """Reset the prefix caches; return whether every worker did."""
        answers = await self._tell_all(PLUGIN_ROUTE, {"method": "reset_prefix_cache"})
        return all(answer.get("reset") is True for answer in answers)

    async def reload(self, folder: str, version: int) -> None:
        """Load a folder by vLLM's own reload, which is right on GPUs only."""
        body = {"model_path": folder, "weight_version": str(version)}
        await self._tell_all("/engine/update_weights_from_disk", body)

    async def _tell_all(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(tell(worker, path, body) for worker in self.workers)))

    async def ping(self) -> None:
        """Raise EngineError unless the frontend says that it is well."""
        await self._frontend.ping()

    async def close(self) -> None:
        """Close the connections to the frontend and to the workers."""
        await asyncio.gather(self._frontend.close(), *(worker.close() for worker in self.workers))


async def tell(worker: Http, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a command to a worker and return its answer. A worker can report a failure with status 200."""
    status, answer = await worker.request("POST", path, body, patient=True, limit=WORKERS_LIMIT)
    return told(worker, path, status, answer)


def told(worker: Http, path: str, status: int, answer: bytes) -> dict[str, Any]:
    """Return the answer of a worker as an object. Raises EngineError if it reports a failure."""
    if status != 200:
        raise refusal(f"{worker.url}{path}", status, answer)
    value = parsed(answer, f"{worker.url}{path}")
    if not isinstance(value, dict) or value.get("status") != "ok":
        raise EngineError(f"{worker.url}{path}: expected status 'ok', got {message_of(answer)}")
    return value


def results_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each process of a worker answered to a call of the plugin's route."""
    results = answer.get("results")
    if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
        raise EngineError(f"expected an object from every process of a worker, got {str(answer)[:200]}")
    return results


def nothing(request: Request) -> list[Sample]:
    """Return the samples of an aborted request whose tokens Dynamo dropped."""
    return [Sample(index, [], [], None, "abort") for index in range(request.sampling.n)]


def request_id(name: str) -> str:
    """Return the name of a request for Dynamo, which takes UUIDs only."""
    return str(uuid.UUID(hex=name.removeprefix("rr-")))


def flight_name(request_id: str) -> str:
    """Return our name of a request from Dynamo's."""
    return f"rr-{uuid.UUID(request_id).hex}"
