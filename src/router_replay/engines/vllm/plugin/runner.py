"""Read from vLLM's model runner what a forward pass will compute, before the pass runs.

vLLM has two model runners. The plugin's other modules see a `Step` and do not know which of them runs.

    first runner (up to 0.30)    `_prepare_inputs` reads the batch, which lies in `input_batch` before the call
    second runner (from 0.31)    `prepare_inputs` makes the batch and returns it

Both methods run before every forward pass that computes tokens of requests, also if a CUDA graph replays the pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin.repairs.seeds import HeldGenerators
from router_replay.errors import EngineError


@dataclasses.dataclass(frozen=True)
class Step:
    """Describe one forward pass: its requests, in the order in which their tokens lie in the batch."""

    names: Sequence[str]  # vLLM's internal id of each request
    scheduled: np.ndarray  # number of tokens that this step computes, for each request
    computed: np.ndarray  # number of tokens that were computed before, for each request
    live: Collection[str]  # all requests that the runner has in its table, also those that are not in this step
    new: Sequence[Any]  # vLLM's data of requests that were not in the table before, with their sampling parameters


def watch(runner: Any, version: str, before: Callable[[], None], on_step: Callable[[Step], None]) -> None:
    """Call `before`, then `on_step` with the step, each time this model runner prepares a forward pass.

    Raises EngineError if the runner is not the one in which this version of vLLM captures routed experts.
    """
    second = versions.uses_second_runner(version)
    name = "prepare_inputs" if second else "_prepare_inputs"
    if not hasattr(runner, name):
        [(variable, value)] = versions.model_runner(version).items()
        raise EngineError(
            f"{type(runner).__module__}.{type(runner).__name__} has no {name}, where the plugin learns what a step "
            f"computes in vLLM {version}: set {variable}={value}"
        )
    make = _second_runner if second else _first_runner
    original = getattr(runner, name)
    setattr(runner, name, functools.wraps(original)(make(runner, original, before, on_step)))


def _first_runner(
    runner: Any, original: Callable[..., Any], before: Callable[[], None], on_step: Callable[[Step], None]
) -> Callable[..., Any]:
    on_cpu = runner.device.type == "cpu"
    generators = HeldGenerators(runner) if on_cpu and hasattr(runner, "discard_request_mask") else None

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray, *rest: Any, **more: Any) -> Any:
        before()
        batch, count = runner.input_batch, len(num_scheduled_tokens)
        on_step(
            Step(
                batch.req_ids[:count],
                num_scheduled_tokens,
                batch.num_computed_tokens_cpu[:count],
                runner.requests.keys(),
                scheduler_output.scheduled_new_reqs,
            )
        )
        if generators is None:
            return original(scheduler_output, num_scheduled_tokens, *rest, **more)
        generators.give_back()
        prepared = original(scheduler_output, num_scheduled_tokens, *rest, **more)
        generators.hold()
        return prepared

    return prepare_inputs


def _second_runner(
    runner: Any, original: Callable[..., Any], before: Callable[[], None], on_step: Callable[[Step], None]
) -> Callable[..., Any]:
    def prepare_inputs(scheduler_output: Any, *rest: Any, **more: Any) -> Any:
        before()
        batch = original(scheduler_output, *rest, **more)
        count = batch.num_reqs
        on_step(
            Step(
                batch.req_ids[:count],
                batch.num_scheduled_tokens[:count],
                batch.num_computed_tokens_np[:count],
                # A preempted request leaves this table, and is among the new requests when it continues.
                runner.req_states.req_id_to_index.keys(),
                scheduler_output.scheduled_new_reqs,
            )
        )
        return batch

    return prepare_inputs


def captures(vllm_config: Any) -> bool:
    """Return whether the engine captures routed experts. From 0.31 on, the switch is in a config of its own."""
    holder = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(holder.enable_return_routed_experts)
