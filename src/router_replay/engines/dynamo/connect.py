"""Finds out what a Dynamo can do: its routes, the plugin in its workers, capture, and the kind of its log-probs.

Releases differ and most of this is a setting, so each thing is tried with a request of one token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router_replay.engines.dynamo.completions import COMPLETIONS, completions_body
from router_replay.engines.dynamo.transport import NO_WORKERS, PLUGIN_ROUTE, DynamoTransport, Found, results_of, told
from router_replay.engines.http import Http, decoded, message_of, printable, refusal
from router_replay.engines.stale import check_server
from router_replay.engines.types import Capabilities, Request, Sampling
from router_replay.engines.vllm.http import GENERATE, WORKERS_LIMIT
from router_replay.engines.vllm.reports import NO_CAPTURE, PluginReport, ServedModel, read_report
from router_replay.engines.vllm.requests import sampling_arguments
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

ATTEMPTS = 3  # to see a row: vLLM up to 0.30 can lose those of an answer, above all of the first one
# One token, and only the likeliest may be drawn: its log-prob is 0 if log-probs are those of the sampling distribution.
_PROBE = Request((0,), Sampling(max_tokens=1, temperature=1.0, ignore_eos=True), id="the first request")
_ONLY_THE_LIKELIEST = {"top_k": 1}
CERTAIN = -1e-6
_NO_KEEPING = (
    "requests that are kept over a weight change need the plugin in the workers, which says which tokens come from "
    "which version"
)
_OWN_RELOAD = (
    "without it, weights are loaded by vLLM's own reload, which reports success and loads wrong experts on a CPU. If "
    "the workers run on GPUs, pass gpu_workers=True"
)


async def connect(
    urls: Sequence[str],
    timeout: float,
    api_key: str | None,
    model: str | None,
    settings: Mapping[str, Any],
    *,
    spec: RouterSpec | None,
    vocabulary: int | None,
    end_of_sequence: tuple[int, ...] | None,
    gpu_workers: bool,
) -> DynamoTransport:
    """Connect to the frontend (the first URL) and the workers. Raises EngineError if they cannot be used."""
    check_server(settings, server=f"the workers of {urls[0]}")
    frontend = Http(urls[0], timeout, "Dynamo", api_key=api_key)
    advice = "Is it running, and DYN_SYSTEM_PORT its port?"
    workers = [Http(url, timeout, "Dynamo worker", advice, api_key=api_key) for url in urls[1:]]
    try:
        name = await _served(frontend, model)
        reports = [await _report(worker) for worker in workers]
        report, no_plugin = _agreed(workers, reports), _why_no_plugin(reports)
        if report is not None:
            served = read_report(report, f"{workers[0].url}{PLUGIN_ROUTE}", spec, vocabulary)
            end_of_sequence = served.end_of_sequence
        elif spec is None:
            raise EngineError(f"{no_plugin}, so Dynamo does not say what its model is: pass spec=RouterSpec(...)")
        else:
            served = ServedModel(spec, vocabulary, end_of_sequence or ())
        probe = await _probe(frontend, name)
        return DynamoTransport(
            frontend,
            workers,
            _found(name, served, end_of_sequence, probe, report, no_plugin, gpu_workers and bool(workers)),
        )
    except BaseException:
        for server in (frontend, *workers):
            await server.close()
        raise


async def _served(frontend: Http, model: str | None) -> str:
    """Return the name of the model to ask for."""
    listed = await frontend.expect("GET", "/v1/models", repeat=True)
    try:
        served = [str(one["id"]) for one in listed["data"]]
    except (KeyError, TypeError) as error:
        came = str(listed)[:200]
        raise EngineError(
            f"{frontend.url}/v1/models: expected a list of models, got {came}. Is this Dynamo?"
        ) from error
    if not served:
        raise EngineError(f"{frontend.url} serves no model yet: wait until a worker has registered")
    name = served[0] if model is None and len(served) == 1 else model
    if name not in served:
        raise EngineError(f"{frontend.url} serves the models {served}, not {name!r}: pass model= with one of them")
    return name


# -- the plugin in the workers ------------------------------------------------------------------------


async def _report(worker: Http) -> PluginReport | None:
    """Return the report of the plugin in a worker, or None if it is not installed there."""
    status, answer = await worker.request(
        "POST", PLUGIN_ROUTE, {"method": "router_replay_report"}, patient=True, limit=WORKERS_LIMIT
    )
    if status == 404:
        return None
    place = f"the report of {worker.url}{PLUGIN_ROUTE}"
    [first, *_] = results_of(told(worker, PLUGIN_ROUTE, status, answer))
    try:
        return msgspec.convert(first, PluginReport)
    except msgspec.ValidationError as error:
        raise EngineError(f"{place} is not the expected JSON: {error}") from error


def _agreed(workers: Sequence[Http], reports: Sequence[PluginReport | None]) -> PluginReport | None:
    """Return what all workers report, or None if one lacks the plugin. Raises EngineError if they differ."""
    active = [report for report in reports if report is not None and report.active]
    if not active or len(active) < len(reports):
        return None
    for worker, report in zip(workers, active, strict=True):
        if report != active[0]:
            raise EngineError(f"{workers[0].url} and {worker.url} differ in their model or their settings")
    return active[0]


def _why_no_plugin(reports: Sequence[PluginReport | None]) -> str:
    if not reports:
        return NO_WORKERS
    refused = [report.reason for report in reports if report is not None and not report.active]
    if refused:
        return printable(refused[0][:2000])
    return "the plugin is not in every worker (ROUTER_REPLAY_VLLM=1, and router-replay installed there)"


# -- the frontend -------------------------------------------------------------------------------------


class _Content(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Content] | None = None  # of the generate route
    token_logprobs: list[float] | None = None  # of completions

    def first(self) -> float | None:
        if self.content:
            return self.content[0].logprob
        return self.token_logprobs[0] if self.token_logprobs else None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    routed_experts: Any = None


class _Nvext(msgspec.Struct):
    routed_experts: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    nvext: _Nvext | None = None

    @property
    def rows(self) -> Any:
        nested = self.nvext.routed_experts if self.nvext else None
        return nested if nested is not None else self.choices[0].routed_experts if self.choices else None


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Holds what the first requests showed."""

    no_generate: str  # why the generate route cannot be used; empty if it can
    prompt_start: bool
    captures: bool
    logprobs_mode: str


async def _probe(frontend: Http, model: str) -> _Probe:
    """Send requests of one token, by the route that later requests take."""
    sampling = sampling_arguments(_PROBE, (), as_text=True) | _ONLY_THE_LIKELIEST
    body: dict[str, Any] = {"model": model, "token_ids": list(_PROBE.token_ids), "sampling_params": sampling}
    path, no_generate, prompt_start = GENERATE, "", False
    status, answer = await frontend.request("POST", GENERATE, body, patient=True)
    if status != 200:
        no_generate = (
            f"{GENERATE} answered {status} ({printable(message_of(answer))[:200]}): start the frontend of Dynamo 1.6 "
            "or newer with DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1"
        )
        path = COMPLETIONS
        body = completions_body(_PROBE, 0, model, "", prompt_start=True) | _ONLY_THE_LIKELIEST
        status, answer = await frontend.request("POST", path, body, patient=True)
        prompt_start = status != 400
        if status == 400:  # "unknown field", in every release up to 1.6.1
            body = completions_body(_PROBE, 0, model, "", prompt_start=False) | _ONLY_THE_LIKELIEST
            status, answer = await frontend.request("POST", path, body, patient=True)
    first = None
    for attempt in range(ATTEMPTS):
        if attempt:
            status, answer = await frontend.request("POST", path, body, patient=True)
        if status != 200:
            raise refusal(f"{frontend.url}{path}, asked for one token,", status, answer)
        first = decoded(answer, _Answer, f"{frontend.url}{path}: the answer to a request of one token")
        if first.rows is not None:
            break
    assert first is not None
    logprob = first.choices[0].logprobs.first() if first.choices and first.choices[0].logprobs else None
    mode = "processed_logprobs" if logprob is not None and logprob >= CERTAIN else "raw_logprobs"
    return _Probe(no_generate, prompt_start, first.rows is not None, mode)


def _found(
    model: str,
    served: ServedModel,
    end_of_sequence: tuple[int, ...] | None,
    probe: _Probe,
    report: PluginReport | None,
    no_plugin: str,
    own_reload: bool,
) -> Found:
    """Combine what the workers report and what the first requests showed."""
    no_weights = ""
    if report is None:
        no_weights = no_plugin if no_plugin == NO_WORKERS else f"{no_plugin}; {_OWN_RELOAD}"
    captures = probe.captures if report is None else report.captures
    reasons = [
        "" if captures else NO_CAPTURE,
        probe.no_generate,
        "" if own_reload else no_weights,
        "" if report is None else printable(report.reason[:2000]),
    ]
    return Found(
        model=model,
        spec=served.spec,
        vocabulary=served.vocabulary,
        end_of_sequence=end_of_sequence,
        logprobs_mode=probe.logprobs_mode if report is None else report.logprobs_mode,
        capabilities=Capabilities(
            routes=captures,
            forced_routes=report is not None and report.forced_routes and not probe.no_generate,
            start=not probe.no_generate or probe.prompt_start,
            versions=report is not None or own_reload,
            checked_weights=report is not None,
            cannot_keep="" if report is not None else _NO_KEEPING,
            why_not="; ".join(reason for reason in reasons if reason),
        ),
        generate=not probe.no_generate,
        prompt_start=probe.prompt_start,
        plugin=report is not None,
        no_generate=probe.no_generate,
        no_weights=no_weights,
    )
