"""Run training steps of one version of this package on request: the worker process of `bench.train_gpu`.

The same file works with the package at commit 1b089bf and with this one; PYTHONPATH says which. It reads one JSON
object per line from stdin and answers each with one line that begins with MARK. The first object describes the modes;
each mode is a policy of its own in this process. Every other object asks one mode for something.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from typing import Any

import numpy as np
import torch

MARK = "@@ "


def first_of(*names: str) -> Any:
    """Import the first of these modules that exists."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise ModuleNotFoundError(f"none of {names}")


class Mode:
    """Holds one policy and the mini-batches of each workload for it."""

    def __init__(self, config: Any, here: Any, workloads: dict[str, dict[str, int]]) -> None:
        policies = first_of("router_replay.rl.policy.policy", "router_replay.rl.policy")
        models = first_of("router_replay.rl.policy.models", "router_replay.rl.models")
        self._delivery = first_of("router_replay.rl.policy.delivery", "router_replay.rl.delivery")
        self._config, self._here, self._cuda = config, here, here.device.type == "cuda"
        others = self._allocated()
        self.policy = policies.Policy(config, here, models.model_folder(config.model.path))
        self._minis = {name: self._planned(**shape) for name, shape in workloads.items()}
        self._own = self._allocated() - others  # bytes; only one mode runs at a time, so every change is its own

    def _planned(self, sequences: int, length: int) -> Any:
        from router_replay import Routes, Sample

        rng = np.random.default_rng(0)
        spec = self.policy.replayer.spec
        vocabulary = self.policy.model.config.vocab_size
        tokens_NT = rng.integers(2, vocabulary, (sequences, length))
        ids_NTLK = self._chosen(tokens_NT)
        captured = np.arange(length) < length - 1  # no engine forwards the last token
        mask = np.arange(length) >= length // 2
        logprobs = np.full(length, -3.0, np.float32)
        samples = [
            Sample(tokens, logprobs, mask, Routes(ids.copy(), spec, captured=captured), float(number % 2) - 0.5)
            for number, (tokens, ids) in enumerate(zip(tokens_NT, ids_NTLK, strict=True))
        ]
        parts = self._delivery.split(samples, range(sequences), self._config.optimizer.mini_batches, (0, 0))
        return self._delivery.plan(parts, self._here, self._config.trainer.max_tokens, "raise")[0]

    def _chosen(self, tokens_NT: np.ndarray) -> np.ndarray:
        """Return the experts that the model itself chooses, [N, T, L, K].

        With them, the experts of a pass with R3 have the same work as those of a pass without replay.
        """
        spec = self.policy.replayer.spec
        count, length = tokens_NT.shape
        at_once = max(1, self._config.trainer.max_tokens // length)
        found = []
        for first in range(0, count, at_once):
            tokens = torch.from_numpy(tokens_NT[first : first + at_once]).to(self._here.device)
            with torch.no_grad(), self.policy.replayer.record() as recorded:
                self.policy.model(input_ids=tokens, use_cache=False)
            found.append(recorded.routes.ids)
        return np.concatenate(found).reshape(count, length, len(spec.layers), spec.top_k)

    def step(self, workload: str, number: int | None = None) -> dict[str, float]:
        """Time score and update of mini-batch `number`, or of a whole step.

        The bytes are those of this mode, without those of the others.
        """
        minis = self._minis[workload]
        minis = minis if number is None else minis[number : number + 1]
        others = self._allocated() - self._own
        for micro in (micro for mini in minis for micro in mini.micro):
            vars(micro).pop("_tensors", None)  # a real step has new batches, which it copies to the device
        own = self._allocated() - others
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        found = self._timed(minis)
        peak = torch.cuda.max_memory_allocated() - others if self._cuda else 0
        self._own = self._allocated() - others
        return {**found, "peak_bytes": float(peak), "resting_bytes": float(own)}  # weights, copies and optimizer

    def _timed(self, minis: Any) -> dict[str, float]:
        before = self._now()
        scored = [self.policy.score(mini) for mini in minis]
        middle = self._now()
        figures = [self.policy.update(mini, old) for mini, old in zip(minis, scored, strict=True)]
        after = self._now()
        self.policy.route_counts()
        return {"score": middle - before, "update": after - middle, "grad_norm": figures[-1]["grad_norm"]}

    def _allocated(self) -> int:
        gc.collect()  # garbage must not be freed in the step of another mode
        return torch.cuda.memory_allocated() if self._cuda else 0

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def profile(self, workload: str) -> dict[str, str]:
        """Return torch's table of kernels of one step."""
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * self._cuda
        with torch.profiler.profile(activities=kinds) as profile:
            self.step(workload)
        averages = profile.key_averages()
        tables = [averages.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)]
        if self._cuda:
            tables.insert(0, averages.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
        return {"table": "\n".join(tables)}

    def syncs(self, workload: str) -> dict[str, list[str]]:
        """Return the places at which one step waits for the GPU, with how often."""
        import collections
        import traceback
        import warnings

        found: collections.Counter[str] = collections.Counter()

        def note(message: Any, *_: Any, **__: Any) -> None:
            if "synchroniz" in str(message):
                frames = [
                    f for f in traceback.extract_stack() if "router_replay" in f.filename or "transf" in f.filename
                ]
                found[" < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in frames[:-4:-1])] += 1

        torch.cuda.set_sync_debug_mode("warn")
        before, warnings.showwarning = warnings.showwarning, note
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = note
                self.step(workload)
        finally:
            warnings.showwarning = before
            torch.cuda.set_sync_debug_mode("default")
        return {"places": [f"{count} x {place}" for place, count in found.most_common()]}


def make_modes(job: dict[str, Any]) -> dict[str, Mode]:
    """Return the modes of a job by name."""
    load_config = importlib.import_module("router_replay.rl.config").load_config
    ranks = first_of("router_replay.rl.processes.ranks", "router_replay.rl.ranks")
    torch.set_num_threads(job["threads"])
    configs = {name: load_config(None, settings) for name, settings in job["modes"].items()}
    here = ranks.join(next(iter(configs.values())))  # a process joins once; the modes do not differ in this
    torch._dynamo.config.recompile_limit *= len(configs)  # torch counts the graphs of all modes together
    if here.device.type == "cuda":  # forward and backward make the workspaces of cuBLAS, which belong to no mode
        some = torch.ones(8, 8, device=here.device, requires_grad=True)
        (some @ some).sum().backward()
    return {name: Mode(config, here, job["workloads"]) for name, config in configs.items()}


def main() -> None:
    modes = make_modes(json.loads(sys.stdin.readline()))
    gc.freeze()  # what exists now stays, and a collection need not look at it
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(modes[asked.pop("mode")], asked.pop("do"))(**asked)
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
