"""Run one vLLM engine in a process of its own, and measure single turns of it for bench.engines.

A turn sends a batch of requests and waits for all completions. Each engine has a client process of its own, so that
no engine shares Python's lock with another, and so that the CPU time of each client can be told apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.engine_probe import PROBE, pin_threads
from bench.verdicts import QUANTILE
from router_replay.engines import Engine, Request, Sampling
from router_replay.engines.vllm.requests import sampling_arguments
from router_replay.routes import Routes
from router_replay.stitch import Trajectory

TRIES = 5  # of one turn
FIRST_TOKEN = 3  # the ids below are special in many vocabularies


@dataclasses.dataclass(frozen=True)
class Work:
    """Describe one turn: so many prompts, their length, how many tokens are sampled, with log-probs and forced rows.

    With `turns`, it is instead sixteen conversations of that many turns, which omit the rows that are known. With
    `profile`, the steps with prompts run in Python's profiler.
    """

    prompts: int
    prompt_tokens: int
    tokens: int
    logprobs: bool = True
    forced: bool = False
    turns: int = 0
    profile: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """Hold the cost of one turn in seconds; `step` and `gpu_step` are the lower quartiles of its pure decode steps.

    `wait` is the time that the client waited. It consists of `before`, the time until the first step starts, of
    `intervals`, the times of all steps but the last, and of `after`, the time from the start of the last step on.
    `parts` are the medians of what the engine core does in a pure decode step, and `prompt_parts` in a step with tokens
    of prompts.
    """

    wait: float
    before: float
    intervals: tuple[float, ...]
    after: float
    step: float
    gpu_step: float
    gpu: float
    core_cpu: float
    client_cpu: float
    steps: int
    decode_steps: int
    compiled: int = 0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    prompt_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    profile: str = ""


class Host:
    """Start an engine in a process of its own. `ready` waits until it runs; `run` measures one turn of it."""

    def __init__(self, name: str, model: str, arguments: dict[str, Any], variables: dict[str, str]) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(pipe, model, arguments, variables), name=name)
        self._process.start()
        pipe.close()

    def ready(self) -> dict[str, Any]:
        """Wait for the start of the engine; return the facts of its report."""
        return self._answer()

    def run(self, work: Work) -> Cost:
        """Run one turn and return its cost."""
        self._pipe.send(work)
        return self._answer()

    def close(self) -> None:
        """End the engine and its process."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(60)
        if self._process.is_alive():
            self._process.terminate()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: the process of this engine ended, see its output above") from None
        if isinstance(answer, str):
            raise SystemExit(f"{self.name}: {answer}")
        return answer


# -- in the process of the engine -------------------------------------------------------------------------------------


def _serve(pipe: Connection, model: str, arguments: dict[str, Any], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    try:
        from router_replay.engines.vllm.inprocess import VllmEngine

        with VllmEngine(model, worker_extension_cls=PROBE, **arguments) as engine:
            turns = _Turns(engine)
            pin_threads()
            report = engine.report()
            pipe.send({name: report[name] for name in ("delivery", "forced_routes", "captures")})
            while (work := pipe.recv()) is not None:
                pipe.send(turns.run(work))
    except BaseException:
        pipe.send(traceback.format_exc())


class _Turns:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._rows: dict[tuple[int, int], list[Routes]] = {}

    def run(self, work: Work) -> Cost:
        """Run one turn, again if Triton compiled a kernel in it, which takes longer than many steps."""
        for _ in range(TRIES):
            cost = self._run(work)
            if not cost.compiled:
                break
        return cost

    def _run(self, work: Work) -> Cost:
        requests = [] if work.turns else self._requests(work)
        self._call("bench_begin", requests=len(requests), profile=work.profile)
        started, client = time.perf_counter(), time.process_time()
        if work.turns:
            _conversation(self._engine, work.turns, work.tokens)
        elif work.logprobs:
            self._engine.generate(requests)
        else:
            self._engine._wait(self._without_logprobs(requests))
        ended, client = time.perf_counter(), time.process_time() - client
        return cost_of(self._call("bench_end"), work.prompts, started, ended, client)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._engine._wait(self._engine._connected.transport.call(method, **arguments))

    def _requests(self, work: Work) -> list[Request]:
        vocabulary = self._engine.vocabulary
        sampling = Sampling(max_tokens=work.tokens, ignore_eos=True)
        shape = work.prompts, work.prompt_tokens
        prompts = self._random.integers(FIRST_TOKEN, vocabulary, shape).tolist()  # new: the prefix cache never hits
        rows: list[Any] = [None] * work.prompts
        if work.forced:
            if shape not in self._rows:  # the rows of earlier prompts: any rows of the right length cost the same
                done = self._engine.generate([Request(tuple(prompt), sampling) for prompt in prompts])
                self._rows[shape] = [completion.routes[: work.prompt_tokens] for completion in done]
                prompts = self._random.integers(FIRST_TOKEN, vocabulary, shape).tolist()
            rows = self._rows[shape]
        return [Request(tuple(p), sampling, forced_routes=r) for p, r in zip(prompts, rows, strict=True)]

    async def _without_logprobs(self, requests: list[Request]) -> None:
        """Generate without log-probs, which `Engine.generate` always asks for; rows become Routes as they do there."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        transport = self._engine._connected.transport
        routes = self._engine.capabilities.routes

        async def one(request: Request) -> None:
            arguments = {**sampling_arguments(request, (), as_text=False), "logprobs": None}
            parameters = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": "bench"}
            outputs = [output async for output in transport._engine.generate(prompt, parameters, request.id)]
            array = outputs[-1].outputs[0].routed_experts
            if routes:
                Routes.from_engine(array, self._engine.spec, allow_zero_layers=True)

        await asyncio.gather(*map(one, requests))


def cost_of(steps: dict[str, Any], requests: int, started: float, ended: float, client_cpu: float) -> Cost:
    """Reduce the steps of one turn to its cost. A pure decode step computes one token of every request."""
    start = np.asarray(steps["start"])
    gpu = np.asarray(steps["gpu"])
    decodes = np.asarray(steps["tokens"]) == requests
    decodes &= np.asarray(steps["requests"]) == requests
    # The time of a step reaches to the start of the next one, so the last step has none.
    intervals = np.diff(start)
    timed = decodes[:-1]
    step = float(np.quantile(intervals[timed], QUANTILE)) if timed.any() else 0.0
    gpu_step = float(np.quantile(gpu[decodes], QUANTILE)) if decodes.any() else 0.0
    return Cost(
        wait=ended - started,
        before=float(start[0]) - started,
        intervals=tuple(intervals.tolist()),
        after=ended - float(start[-1]),
        step=step,
        gpu_step=gpu_step,
        gpu=float(gpu[~decodes].sum() + gpu_step * decodes.sum()),
        core_cpu=steps["cpu"],
        client_cpu=client_cpu,
        steps=len(start),
        decode_steps=int(decodes.sum()),
        compiled=steps["compiled"],
        parts=_medians(steps["parts"], decodes),
        prompt_parts=_medians(steps["parts"], np.asarray(steps["tokens"]) > np.asarray(steps["requests"])),
        profile=steps.get("profile", ""),
    )


def _medians(parts: dict[str, list[float]], chosen: np.ndarray) -> dict[str, float]:
    return {name: float(np.median(np.asarray(taken)[chosen])) for name, taken in parts.items()} if chosen.any() else {}


def _conversation(engine: Engine, turns: int, tokens: int) -> None:
    """Play sixteen conversations; each turn adds a few environment tokens and samples some, omitting known rows."""
    routes = engine.capabilities.routes
    agents = [Trajectory(engine.spec) for _ in range(16)]
    rng = np.random.default_rng(0)
    histories = [rng.integers(FIRST_TOKEN, 100, tokens).tolist() for _ in agents]
    for _ in range(turns):
        requests = [
            Request(tuple(history), Sampling(max_tokens=tokens, ignore_eos=True), agent.next_start if routes else 0)
            for agent, history in zip(agents, histories, strict=True)
        ]
        for agent, history, request, done in zip(agents, histories, requests, engine.generate(requests), strict=True):
            if routes:
                agent.append(request.token_ids, done.token_ids, done.logprobs, done.routes, done.start)
            history += [*done.token_ids.tolist(), *rng.integers(FIRST_TOKEN, 100, 8).tolist()]
