"""Record the time of every step inside a vLLM worker. vLLM adds this class to its worker (`worker_extension_cls`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

PROBE = "bench.engine_probe.StepProbe"


class StepProbe:
    """Note when each step of the model runner starts, its tokens and its time on the GPU, and the CPU time of them all.

    On one GPU the worker runs in the process of the engine core, so the CPU time is that of the engine core too.
    """

    model_runner: Any
    bench_steps: list[dict[str, Any]] | None
    bench_cpu: float
    bench_compiled: int

    def bench_begin(self) -> dict[str, Any]:
        """Forget earlier steps and start to record."""
        runner = self.model_runner
        if not hasattr(self, "bench_steps"):
            pin_threads()
            self._bench_counting_compilations()
            runner.execute_model = self._bench_starting(runner.execute_model)
            if hasattr(runner, "sample_tokens"):
                runner.sample_tokens = self._bench_ending(runner.sample_tokens)
        self.bench_steps = []
        self.bench_compiled = 0
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
        }

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
            }
            steps.append(step)
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


def _event() -> Any:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _gpu_seconds(step: dict[str, Any]) -> float:
    first, *_, last = step["events"]
    return first.elapsed_time(last) / 1e3 if first is not None else 0.0
