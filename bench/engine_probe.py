"""Record the time of every step inside a vLLM worker. vLLM adds this class to its worker (`worker_extension_cls`)."""

from __future__ import annotations

import contextlib
import cProfile
import functools
import importlib
import inspect
import io
import os
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch

PROBE = "bench.engine_probe.StepProbe"
# The parts of a step of the engine core, in their order. What is in none of them receives and sends messages.
PARTS = ("forward", "sample", "wait", "output", "update", "schedule")
# The classes whose `get_output` waits for the GPU, and their attribute with the event that it waits for.
OUTPUTS = (
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", "copy_event"),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput", "async_copy_ready_event"),
)


class StepProbe:
    """Note when each step of the model runner starts, its tokens and its time on the GPU, and the CPU time of them all.

    On one GPU the worker runs in the process of the engine core, so the CPU time is that of the engine core too.
    """

    model_runner: Any
    bench_steps: list[dict[str, Any]] | None
    bench_cpu: float
    bench_compiled: int
    bench_awaited: int
    bench_profile: cProfile.Profile | None

    def bench_begin(self, requests: int = 0, profile: bool = False) -> dict[str, Any]:
        """Forget earlier steps and start to record. No step starts before so many requests have arrived.

        Otherwise the first steps would compute the prompts that happen to be there, which differ from turn to turn.
        With `profile`, the steps with prompts run in Python's profiler.
        """
        runner = self.model_runner
        if not hasattr(self, "bench_steps"):
            pin_threads()
            self._bench_counting_compilations()
            self._bench_timing_parts()
            runner.execute_model = self._bench_starting(runner.execute_model)
            if hasattr(runner, "sample_tokens"):
                runner.sample_tokens = self._bench_ending(runner.sample_tokens)
        self.bench_steps = []
        self.bench_compiled = 0
        self.bench_awaited = requests
        self.bench_profile = cProfile.Profile() if profile else None
        self.bench_cpu = time.process_time()
        return {}

    def bench_end(self) -> dict[str, Any]:
        """Stop recording. Return the CPU seconds and compilations since the beginning, and lists of all steps."""
        cpu = time.process_time() - self.bench_cpu
        steps, self.bench_steps = self.bench_steps or [], None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {
            "cpu": cpu,
            "compiled": self.bench_compiled,
            "start": [step["start"] for step in steps],
            "tokens": [step["tokens"] for step in steps],
            "requests": [step["requests"] for step in steps],
            "gpu": [_gpu_seconds(step) for step in steps],
            "parts": {name: [step["parts"].get(name, 0.0) for step in steps] for name in PARTS},
            "profile": "" if self.bench_profile is None else _table(self.bench_profile),
        }

    def _bench_timing_parts(self) -> None:
        """Time the calls that the engine core makes in a step. It is in this process if there is one worker."""
        core_type = importlib.import_module("vllm.v1.engine.core").EngineCore
        frame = inspect.currentframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), core_type):
            frame = frame.f_back
        if frame is None:
            return
        core = frame.f_locals["self"]
        core.scheduler.has_requests = self._bench_awaiting(core.scheduler, core.scheduler.has_requests)
        for owner, method, part in (
            (core.model_executor, "execute_model", "forward"),
            (core.model_executor, "sample_tokens", "sample"),
            (core.scheduler, "update_from_output", "update"),
            (core.scheduler, "schedule", "schedule"),
        ):
            setattr(owner, method, self._bench_timed(getattr(owner, method), part))
        for module, name, event in OUTPUTS:
            with contextlib.suppress(ImportError, AttributeError):
                kind = getattr(importlib.import_module(module), name)
                wait = self._bench_timed(_waiting(event), "wait")
                kind.get_output = self._bench_output(wait, self._bench_timed(kind.get_output, "output"))

    def _bench_awaiting(self, scheduler: Any, original: Callable[[], bool]) -> Callable[[], bool]:
        def has_requests() -> bool:
            if self.bench_awaited > len(scheduler.requests):
                return False
            self.bench_awaited = 0
            return original()

        return has_requests

    def _bench_timed(self, original: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*arguments: Any, **more: Any) -> Any:
            started = time.perf_counter()
            result = original(*arguments, **more)
            if self.bench_steps:
                parts = self.bench_steps[-1]["parts"]
                parts[part] = parts.get(part, 0.0) + time.perf_counter() - started
            return result

        return timed

    @staticmethod
    def _bench_output(wait: Callable[[Any], None], rest: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wait for the GPU first, so that the time of the original method has no waiting in it."""

        def get_output(output: Any) -> Any:
            wait(output)
            return rest(output)

        return get_output

    def _bench_counting_compilations(self) -> None:
        """Count the kernels that Triton compiles. It compiles for numbers of tokens that it has not met before."""
        try:
            kernels: Any = importlib.import_module("triton.runtime.jit").JITFunction
        except ImportError:
            return
        original = getattr(kernels, "_do_compile", None)
        if original is None:
            return

        def compiling(kernel: Any, *arguments: Any, **more: Any) -> Any:
            self.bench_compiled += 1
            return original(kernel, *arguments, **more)

        kernels._do_compile = compiling

    def _bench_starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute_model(scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
            steps = self.bench_steps
            if steps is None or not scheduler_output.total_num_scheduled_tokens:
                return original(scheduler_output, *arguments, **more)
            step = {
                "start": time.perf_counter(),
                "tokens": scheduler_output.total_num_scheduled_tokens,
                "requests": len(scheduler_output.num_scheduled_tokens),
                "events": [_event()],
                "parts": {},
            }
            steps.append(step)
            profile = self.bench_profile if step["tokens"] > step["requests"] else None
            with profile or contextlib.nullcontext():
                result = original(scheduler_output, *arguments, **more)
            step["events"].append(_event())
            return result

        return execute_model

    def _bench_ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sample_tokens(*arguments: Any, **more: Any) -> Any:
            result = original(*arguments, **more)
            if self.bench_steps:
                self.bench_steps[-1]["events"].append(_event())
            return result

        return sample_tokens


def pin_threads(cores: int = 4) -> None:
    """Let all threads of this process run on the same few cores, which all engines share: only one of them works."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2 * cores:
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread may end
            os.sched_setaffinity(int(thread), allowed[:cores])


def _waiting(event: str) -> Callable[[Any], None]:
    return lambda output: getattr(output, event).synchronize()


def _table(profile: cProfile.Profile) -> str:
    """Return the functions that took the most time themselves."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
    return text.getvalue()


def _event() -> Any:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _gpu_seconds(step: dict[str, Any]) -> float:
    first, *_, last = step["events"]
    return first.elapsed_time(last) / 1e3 if first is not None else 0.0
