"""Make the engine use the rows that came with a request as its experts, whatever its routers prefer.

A buffer holds one row per token of a step, with -1 where the router is free. It is filled before each forward pass and
read by every router. It is allocated once, before CUDA graphs are captured, so a graph reads the current step's rows.

Shapes: T tokens of a step, L routed layers, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from router_replay.engines.vllm.plugin.routes.rules import Rule, find_rule, force
from router_replay.engines.vllm.plugin.runner import Step
from router_replay.engines.vllm.requests import routes_of, rows_given
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

FREE = -1


class ForcedRouting:
    """Hold the buffer of forced rows and the rows of each request that has some, for one model runner."""

    def __init__(self, runner: Any, spec: RouterSpec) -> None:
        self._runner = runner
        self._spec = spec
        tokens = runner.scheduler_config.max_num_batched_tokens
        sizes = runner.compilation_config.cudagraph_capture_sizes or [0]
        shape = (max(tokens, *sizes, 1), *spec.row_shape)
        dtype = torch.int16 if spec.num_experts <= 1 << 15 else torch.int32
        self.buffer_TLK = torch.full(shape, FREE, dtype=dtype, device=runner.device)
        self._rows: dict[str, Routes] = {}
        self._longest = 0  # the largest number of rows of any request
        self._dirty = 0  # number of buffer rows that may differ from FREE
        # Whether vLLM has warmed up. Before that, every pass runs the code that forces, so that it is compiled when a
        # CUDA graph is captured. A CPU has no graphs.
        self.warm = not self.buffer_TLK.is_cuda
        self.forced_rows = 0  # counted since the start; the report shows that rows are forced

    # -- each step ------------------------------------------------------------------------------

    def fill(self, step: Step) -> None:
        """Write this step's forced rows into the buffer. Costs almost nothing while no request has rows to force."""
        self._take(step)
        if not self._rows or step.computed.min(initial=self._longest) >= self._longest:
            self._clear()
            return
        total = int(step.scheduled.sum())
        used = max(total, self._dirty)
        # A tensor of its own for each step: the second model runner prepares a step while the copy of the last one may
        # still wait on the device. torch reuses pinned memory only after the copies from it have ended (on an H200, one
        # tensor for all steps gave wrong rows in 198 of 200 steps, a tensor for each step in none).
        shape, buffer = (used, *self._spec.row_shape), self.buffer_TLK
        staging_TLK = torch.empty(shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
        staging = staging_TLK.numpy()
        staging.fill(FREE)
        written, row = 0, 0
        for name, count, first in zip(step.names, step.scheduled.tolist(), step.computed.tolist(), strict=True):
            routes = self._rows.get(name)
            if routes is not None and first < len(routes):
                written += _write(staging[row : row + count], routes, first)
            row += count
        self.forced_rows += written
        if not written:
            self._clear()
            return
        self.buffer_TLK[:used].copy_(staging_TLK, non_blocking=True)
        self._dirty = total

    def _take(self, step: Step) -> None:
        """Store the rows of new requests while the runner has them in its table.

        A preempted request either stays in the table or comes again as a new one, with its rows. The scheduler does not
        report finished requests here when nothing else runs, so the table is checked.
        """
        if not step.new:
            return
        started = {request.req_id for request in step.new}
        self._rows = {name: rows for name, rows in self._rows.items() if name in step.live and name not in started}
        for request in step.new:
            given = rows_given(request.sampling_params)
            if given is not None:
                # Rows given as bytes were checked or created where the request came in.
                self._rows[request.req_id] = routes_of(given, self._spec, check_rows=isinstance(given, str))
        self._longest = max(map(len, self._rows.values()), default=0)

    def _idle(self) -> bool:
        """Return whether this pass forces nothing, so that its routers need no second look.

        A CUDA graph and compiled code also serve later passes, which may force rows: they are never idle.
        """
        if self._dirty or not self.warm or torch.compiler.is_compiling():
            return False
        return not (self.buffer_TLK.is_cuda and torch.cuda.is_current_stream_capturing())

    def _clear(self) -> None:
        if self._dirty:
            self.buffer_TLK[: self._dirty].fill_(FREE)
            self._dirty = 0

    # -- installing -----------------------------------------------------------------------------

    def install(self) -> dict[str, int]:
        """Wrap every router so that forced rows replace its choice; return how many routers follow each rule."""
        routers = find_routers(self._runner.model, self._spec)
        model = self._runner.model_config
        rules: dict[int, Rule] = {}
        for column, router in enumerate(routers):
            rules[column] = find_rule(router, model.get_hidden_size(), model.dtype, self._runner.device)
        for column, router in enumerate(routers):
            router._compute_routing = self._forcing(router._compute_routing, column, rules[column])
        return {str(rule): list(rules.values()).count(rule) for rule in rules.values()}

    def _forcing(self, original: Callable[..., Any], column: int, rule: Rule) -> Callable[..., Any]:
        buffer_TLK = self.buffer_TLK
        substitute = _force_on_gpu() if buffer_TLK.is_cuda else force

        def compute_routing(
            hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: Any, **more: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights_TK, ids_TK = original(hidden_states, router_logits, indices_type, **more)
            if self._idle():
                return weights_TK, ids_TK
            return substitute(rule, weights_TK, ids_TK, router_logits, buffer_TLK, column)

        return compute_routing


def find_routers(model: torch.nn.Module, spec: RouterSpec) -> list[Any]:
    """Return the model's routers in the order of spec.layers; raise with the reason if routes cannot be forced."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter

    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        if router is None or not hasattr(module, "layer_id") or not hasattr(router, "select_experts"):
            continue
        method = getattr(module, "_quant_method", None)
        if getattr(method, "is_monolithic", False):
            raise EngineError(
                f"{name} uses a monolithic MoE kernel ({type(method).__name__}), which routes inside the kernel, where "
                "rows cannot be forced: choose a modular kernel, for example with VLLM_USE_FLASHINFER_MOE_FP16=0 or "
                "--moe-backend triton"
            )
        if reason := _other_tokens(module):
            raise EngineError(f"forced routing does not work with {name}: {reason}")
        if not isinstance(router, BaseRouter) or isinstance(router, ZeroExpertRouter):
            raise EngineError(
                f"{name} has a router of class {type(router).__name__}, which forced routing does not support"
            )
        if router.top_k != spec.top_k or module.layer_id in found:
            raise EngineError(
                f"{name}: expected one router with top_k {spec.top_k} in layer {module.layer_id}, got top_k "
                f"{router.top_k}; routers were already found in layers {sorted(found)}"
            )
        found[module.layer_id] = router
    if tuple(sorted(found)) != spec.layers:
        raise EngineError(
            f"vLLM's model has routers in layers {sorted(found)}, expected {list(spec.layers)} from its config"
        )
    return [found[layer] for layer in spec.layers]


def _other_tokens(layer: Any) -> str:
    """Return why this layer's router would see other tokens than those of its own rank's step, or an empty string.

    Data parallelism with modular kernels is not a reason: such a kernel exchanges tokens after the routing.
    """
    if layer.do_naive_dispatch_combine:
        return "its kernel gathers the tokens of all ranks before routing; choose another one (--moe-backend triton)"
    if layer.moe_config.is_sequence_parallel:
        return (
            "sequence parallelism splits the tokens of a step; leave out one of expert parallelism, data parallelism "
            "and tensor parallelism"
        )
    return ""


def refuse_unsupported(config: Any) -> None:
    """Raise for configurations in which a row of the buffer would not be the row that a router sees."""
    parallel = config.parallel_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism, which splits the tokens of a step": parallel.prefill_context_parallel_size > 1,
        "dual batch overlap, which splits the tokens of a step": parallel.use_ubatching,
        "fast prefill, which leaves tokens out in some layers": config.cache_config.kv_sharing_fast_prefill,
        "speculative decoding": config.speculative_config is not None,
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise EngineError(f"forced routing does not support: {'; '.join(found)}")


def _write(staging_TLK: np.ndarray, routes: Routes, first: int) -> int:
    """Write the captured rows of a request, from its token `first` on, to its place; return how many they are."""
    written, end = 0, first + len(staging_TLK)
    for start, stop in routes.captured_runs.spans(True):
        start, stop = max(start, first), min(stop, end)
        if start < stop:
            staging_TLK[start - first : stop - first] = routes.ids[start:stop]
            written += stop - start
    return written


def _force_on_gpu() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from router_replay.engines.vllm.plugin.routes import force_kernel  # needs Triton, which vLLM has on a GPU

    return force_kernel.force
