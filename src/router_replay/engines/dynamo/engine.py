"""Connects to a Dynamo frontend by URL, and to the system servers of its workers.

    with DynamoEngine("http://127.0.0.1:8000", workers=["http://127.0.0.1:8081"]) as engine:
        print(engine.capabilities.why_not)      # what this Dynamo cannot do, found out when connecting

The frontend only generates. Aborts, pauses and new weights go to the workers' system servers (DYN_SYSTEM_PORT;
`/v1/rl/workers` on the discovery port lists them as `system_url`). What works best: a frontend with
`DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1`, and workers with `--enable-rl --enable-return-routed-experts` that have our
vLLM plugin (`ROUTER_REPLAY_VLLM=1`). `connect.py` finds out what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router_replay.engines import checks
from router_replay.engines.backend import Backend, BrokenError, Flight, Progress
from router_replay.engines.base import SharedTensors, WeightSource
from router_replay.engines.dynamo.connect import connect
from router_replay.engines.dynamo.transport import NO_WORKERS, DynamoTransport
from router_replay.engines.http import checked_url
from router_replay.engines.remote import RemoteEngine
from router_replay.engines.types import Request
from router_replay.engines.vllm.client import VllmBackend
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec


class DynamoEngine(RemoteEngine):
    """Connects to one Dynamo frontend at `url`.

    `spec` and `vocabulary` describe the model; with the plugin in the workers they can be left out. `model` is the
    served name, needed if the frontend serves several. `workers` are the URLs of the workers' system servers; without
    them the weights are fixed and aborted requests return nothing.

    `end_of_sequence` are the model's end-of-sequence tokens. Only a Dynamo without the generate route and without the
    plugin needs them: there an aborted answer looks like an ended one.

    `gpu_workers` says that the workers run on GPUs. Without the plugin, new weights are loaded by vLLM's own reload,
    which reports success and loads wrong experts on a CPU; Dynamo does not say where its workers run.

    `settings` are the workers' engine arguments, if the caller knows them. Arguments that make rows stale (KV offload,
    a KV connector, context or pipeline parallel, prefill/decode) are refused here, because Dynamo does not report
    them. `version` is the policy version of the weights that the workers have now. `timeout` limits one generation or
    weight update, in seconds; `api_key` is sent to the frontend and to the workers. `allow_zero_layers` is for top-1
    models in which a layer can choose expert 0 for 64 consecutive tokens.
    """

    server = "Dynamo"

    def __init__(
        self,
        url: str,
        spec: RouterSpec | None = None,
        *,
        model: str | None = None,
        workers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        version: int = 0,
        timeout: float = 3600.0,
        api_key: str | None = None,
        vocabulary: int | None = None,
        end_of_sequence: Sequence[int] | None = None,
        gpu_workers: bool = False,
        allow_zero_layers: bool = False,
    ) -> None:
        if isinstance(workers, str):
            raise EngineError(f"workers must be a list of URLs, got {checks.shown(workers)}")
        urls = [checked_url(url), *map(checked_url, workers)]
        tokens, seconds = checks.vocabulary(vocabulary), checks.seconds(timeout, "timeout")
        on_gpus = checks.flag(gpu_workers, "gpu_workers")
        ends = None if end_of_sequence is None else checks.tokens(end_of_sequence, "end_of_sequence", tokens)

        async def connected() -> Backend:
            transport = await connect(
                urls, seconds, api_key, model, settings or {}, spec=spec, vocabulary=tokens, end_of_sequence=ends,
                gpu_workers=on_gpus,
            )  # fmt: skip
            return DynamoBackend(transport)

        super().__init__(connected, version, allow_zero_layers=allow_zero_layers)

    def _source(self, source: WeightSource) -> WeightSource:
        """Check the weights: a folder, or shared memory if the plugin is in the workers."""
        backend = self._connected
        assert isinstance(backend, DynamoBackend)
        if isinstance(source, SharedTensors) and backend.transport.found.plugin:
            return source
        return checks.folder(source)

    def report(self) -> dict[str, Any]:
        """Return the report of the plugin in the first worker: router rules, rows forced so far, its seams."""
        backend = self._connected
        assert isinstance(backend, DynamoBackend)
        return self._wait(backend.transport.call("router_replay_report"))


class DynamoBackend(VllmBackend):
    """Implements the Backend calls where a Dynamo differs from a vLLM server."""

    transport: DynamoTransport

    def refuse(self, request: Request) -> None:
        """Raise EngineError for a request that this Dynamo would answer wrongly."""
        found, sampling = self.transport.found, request.sampling
        if sampling.temperature not in (0.0, 1.0) and not found.logprobs_mode.startswith("processed"):
            raise EngineError(
                f"{request.id}: temperature {sampling.temperature}, but the log-probs of this Dynamo are those of "
                "temperature 1: start its workers with --enable-rl (or --logprobs-mode processed_logprobs)"
            )
        if found.generate:
            return
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise EngineError(
                f"{request.id}: stop_token_ids with ignore_eos: Dynamo's /v1/completions then ignores the stop tokens. "
                f"{found.no_generate}"
            )
        if not sampling.ignore_eos and found.end_of_sequence is None:
            raise EngineError(
                f"{request.id}: an aborted answer of Dynamo's /v1/completions says 'stop' as an ended one does, and "
                "the two differ by the last token only: pass end_of_sequence= (eos_token_id of the model's "
                "generation_config.json), or set ignore_eos"
            )

    async def stop(self, flights: Sequence[Flight]) -> None:
        """Ask every worker to end these requests."""
        await self.transport.abort([name for flight in flights for name in flight.names])

    async def hold(self, kept: Sequence[Flight]) -> None:
        """Pause all workers. Raises EngineError if there are requests in `kept` and no workers."""
        if self.transport.workers:
            await super().hold(kept)
        elif kept:
            raise EngineError(
                f"in_flight='keep' is not possible: {NO_WORKERS}. Pass workers=, or in_flight='abort' or 'wait'"
            )
        # Without workers nothing is held: this engine's requests have ended, and new ones wait until it resumes.

    async def go(self) -> None:
        """Resume all workers."""
        if self.transport.workers:
            await super().go()

    async def find(self, source: WeightSource) -> None:
        """Raise EngineError if the workers cannot load these weights."""
        if not self.capabilities.versions:
            raise EngineError(f"weights cannot be loaded: {self.transport.found.no_weights}")
        if self.transport.found.plugin:
            await super().find(source)

    async def load(self, source: WeightSource, version: int, kept: Sequence[Flight]) -> Progress:
        """Load weights in every worker: by the plugin, or else by vLLM's own reload."""
        if self.transport.found.plugin:
            return await super().load(source, version, kept)
        if kept:
            raise EngineError(
                "in_flight='keep' would mix two policies in one answer, and without the plugin in the workers Dynamo "
                "does not say which tokens come from which: pass in_flight='abort' or 'wait'"
            )
        try:
            await self.transport.reload(checks.folder(source), version)
        except EngineError as error:  # an error answer does not say whether the weights were touched
            raise BrokenError(
                f"not every worker loaded {source}, so the workers may serve different weights: {error}. Restart the "
                "workers, then create a new engine"
            ) from error
        self._updates += 1
        return {}
