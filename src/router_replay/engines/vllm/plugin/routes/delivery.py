"""Send captured rows and log-probs from vLLM's engine core as arrays per step instead of per request.

During decoding, each request gets one new row per step. vLLM slices that row out and sends it as a separate array.
Doing this in Python for each of 256 requests is most of the cost of capture. Here the rows of a step are sent together,
attached to the first of their requests, and split again where the message is read:

    sent by vLLM       a: [1, L, K]      b: [1, L, K]      c: [512, L, K] (a prompt)
    sent here          a: [2, 1, L, K]   b: nothing        c: [512, L, K]

Log-probs are three arrays per request, with or without capture, and are sent in the same way.

Up to vLLM 0.30, the scheduler stores rows by their place in the KV cache. It lists the blocks of every request in every
step, so that it can read a prompt's rows when the prompt is done. Here only requests that have no token yet are listed.
From 0.31 on, the worker sends the rows of each request, and the scheduler only hands them on.

The process that starts an engine core and reads its messages requests packing through an environment variable, so rows
are packed only if the reader unpacks them. Anything unexpected is left to vLLM, and the plugin's report gives the
reason.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from router_replay.engines.environment import environment
from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.plugin.routes.commit import StepRows
from router_replay.engines.vllm.plugin.runner import captures
from router_replay.errors import EngineError

# Set in an engine core to the id of the process that reads its messages and unpacks rows, which is its parent. If the
# user sets it to "0", delivery is left to vLLM.
ENVIRONMENT = "ROUTER_REPLAY_VLLM_PACKED"
LOGPROBS = ("logprob_token_ids", "logprobs", "sampled_token_ranks")  # fields of vLLM's LogprobsLists, one per token


def state(vllm_config: Any) -> str:
    """Return "packed", or the reason why rows are sent as vLLM sends them. Works in any process of an engine."""
    reason = _reason_against(vllm_config)
    if not reason and not os.environ.get(ENVIRONMENT):
        reason = "the process that reads the engine's messages did not request packed rows"
    return reason or "packed"


def _reason_against(vllm_config: Any) -> str:
    if os.environ.get(ENVIRONMENT) == "0":
        return f"packing was turned off ({ENVIRONMENT}=0)"
    if not captures(vllm_config):
        return "the engine does not capture rows"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "data parallelism is not supported"
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return "a diffusion model samples more than one token in a step"
    return _unexpected()


@functools.cache
def _unexpected() -> str:
    return "; ".join(seams.problems("delivery") + seams.problems("storage"))


# -- the engine core --------------------------------------------------------------------------------


class Delivery:
    """Deliver the rows of one scheduler of vLLM 0.31 or newer, and the log-probs of any scheduler, once per step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._update_from_output = scheduler.update_from_output

    def attach(self) -> None:
        """Replace the scheduler's methods with those below."""
        self._scheduler.update_from_output = self.update_from_output

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> dict[int, Any]:
        """Return vLLM's messages of a step, with the rows of all decoding requests of a message in one array."""
        step = model_output.aux_output_connector_output
        if not isinstance(step, StepRows):
            return self._with_logprobs(scheduler_output, model_output)
        connector = self._scheduler.aux_output_connector
        take, others = connector.take_output, step.others

        def take_others(request: Any, output: Any) -> Any:
            return take(request, output) if request.request_id in others else None

        connector.take_output = take_others
        try:
            messages = self._with_logprobs(scheduler_output, model_output)
        finally:
            del connector.take_output
        for message in messages.values():
            sampled = [output for output in message.outputs if output.new_token_ids]
            decoded = [output for output in sampled if output.request_id not in others]
            # The reader gives packed rows to all outputs that have none.
            packed = not any(output.routed_experts is None for output in sampled if output.request_id in others)
            if decoded:
                _attach_rows(decoded, step, packed)
        return messages

    def _with_logprobs(self, scheduler_output: Any, model_output: Any) -> dict[int, Any]:
        """Let vLLM make its messages without log-probs, and attach those of a message to its first output."""
        logprobs = self._logprobs_of(model_output, scheduler_output.num_scheduled_tokens)
        if logprobs is not None:
            model_output.logprobs = None
        messages: dict[int, Any] = self._update_from_output(scheduler_output, model_output)
        places = model_output.req_id_to_index
        for message in messages.values():
            sampled = [output for output in message.outputs if output.new_token_ids]
            if logprobs is not None and sampled:
                wanted = [places[output.request_id] for output in sampled]
                sampled[0].new_logprobs = logprobs._replace(
                    **{name: getattr(logprobs, name)[wanted] for name in LOGPROBS}
                )
        return messages

    def _logprobs_of(self, model_output: Any, scheduled: Mapping[str, int]) -> Any:
        """Return the step's log-probs if every request asks for them and has exactly one token, otherwise None."""
        logprobs = model_output.logprobs
        if logprobs is None or logprobs.cu_num_generated_tokens is not None:
            return None
        for name in scheduled:
            request = self._scheduler.requests.get(name)
            parameters = request.sampling_params if request is not None else None
            if parameters is None or parameters.num_logprobs is None:
                return None
        return logprobs


class FirstRunnerDelivery(Delivery):
    """Deliver the rows of one scheduler up to vLLM 0.30, doing once per step what it would do per request."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._listed: dict[str, list[int]] = scheduler._re_block_ids
        self._stored = scheduler.routed_experts_mgr
        self._update_after_schedule = scheduler._update_after_schedule

    def attach(self) -> None:
        """Replace the scheduler's methods with those below."""
        super().attach()
        self._scheduler._update_after_schedule = self.update_after_schedule

    def update_after_schedule(self, scheduler_output: Any) -> None:
        """List the blocks of prompts, because a later step may free them before this step's rows are read."""
        scheduler = self._scheduler
        scheduler.enable_return_routed_experts = False  # the original method reads it only for vLLM's own list
        try:
            self._update_after_schedule(scheduler_output)
        finally:
            scheduler.enable_return_routed_experts = True
        for name in scheduler_output.num_scheduled_tokens:
            request = scheduler.requests[name]
            # A resumable request has no output token again after each new prompt, even while one of its steps is
            # running.
            if not request._output_token_ids or request.resumable:
                blocks = scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
                self._listed[name] = blocks[self._stored.attn_gid]

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> dict[int, Any]:
        """Return vLLM's messages of this step, with the rows and log-probs packed."""
        routed = model_output.routed_experts
        if routed is None:
            return self._update_from_output(scheduler_output, model_output)
        scheduled = scheduler_output.num_scheduled_tokens
        self._stored.store_batch(routed.routing_data, routed.slot_mapping)
        prompts = self._prompts_of(scheduled)
        model_output.routed_experts = None  # vLLM then creates its outputs without rows
        messages = self._with_logprobs(scheduler_output, model_output)
        places = model_output.req_id_to_index
        # Rows are in the model runner's order, and a decoding request needs the last of its rows.
        last = np.cumsum([scheduled[name] for name in model_output.req_ids]) - 1
        for message in messages.values():
            sampled = [output for output in message.outputs if output.new_token_ids]
            for output in sampled if prompts else ():
                if output.request_id in prompts:
                    blocks = self._listed.pop(output.request_id)
                    output.routed_experts = self._stored.get(blocks, *prompts[output.request_id])
            decoded = [output for output in sampled if output.request_id not in prompts]
            if decoded:
                rows = routed.routing_data[last[[places[output.request_id] for output in decoded]]]
                decoded[0].routed_experts = rows.astype(self._stored.routed_experts_by_slot.dtype)[:, None]
        return messages

    def _prompts_of(self, scheduled: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Return, for each request without a token yet, its prompt length and how many of its rows are not wanted.

        Must be called before vLLM continues, because vLLM may then give a request of several prompts its next one.
        """
        found = {}
        for name in self._listed.keys() & scheduled.keys():
            request = self._scheduler.requests.get(name)
            if request is not None and not request._output_token_ids:
                parameters = request.sampling_params
                start = parameters.routed_experts_prompt_start if parameters is not None else None
                found[name] = request.num_prompt_tokens, start or 0
        return found


def _attach_rows(outputs: Sequence[Any], step: StepRows, packed: bool) -> None:
    """Give these outputs their rows of the step: all of them to the first output, or to each its own."""
    names = [output.request_id for output in outputs]
    rows = step.rows if names == step.names else step.rows[[step.index[name] for name in names]]
    if packed and len(outputs) > 1:
        outputs[0].routed_experts = rows[:, None]
        return
    for output, row in zip(outputs, rows, strict=True):
        output.routed_experts = row[None]


def _attach(scheduler: Any) -> None:
    if os.environ.get(ENVIRONMENT) == str(os.getppid()) and not _reason_against(scheduler.vllm_config):
        import vllm

        kind = Delivery if versions.uses_second_runner(vllm.__version__) else FirstRunnerDelivery
        kind(scheduler).attach()


# -- the process that reads -------------------------------------------------------------------------


def unpack(outputs: Sequence[Any]) -> None:
    """Restore the row and log-probs of every output in a message. A message that was not packed stays unchanged."""
    sampled = [output for output in outputs if output.new_token_ids]
    _unpack_logprobs(sampled)
    carrier = next((one for one in sampled if one.routed_experts is not None and one.routed_experts.ndim == 4), None)
    if carrier is None:
        return
    packed = carrier.routed_experts
    single = [one for one in sampled if one is carrier or one.routed_experts is None]
    _refuse_other_count("rows", len(packed), len(single))
    for output, row in zip(single, packed, strict=True):
        output.routed_experts = row.copy()  # a view would keep the step's message alive as long as its longest request


def _unpack_logprobs(sampled: Sequence[Any]) -> None:
    packed = sampled[0].new_logprobs if sampled else None
    if packed is None or len(packed.logprobs) <= len(sampled[0].new_token_ids):
        return
    _refuse_other_count("log-probs", len(packed.logprobs), len(sampled))
    kind, (token_ids, logprobs, ranks) = type(packed), (getattr(packed, name) for name in LOGPROBS)
    for place, output in enumerate(sampled):
        own = slice(place, place + 1)
        output.new_logprobs = kind(token_ids[own], logprobs[own], ranks[own], None)


def _refuse_other_count(what: str, packed: int, requests: int) -> None:
    if packed != requests:
        raise EngineError(
            f"a message of vLLM's engine core has {packed} packed {what} for {requests} requests, expected one for "
            f"each: set {ENVIRONMENT}=0 to send them unpacked"
        )


def _unpacking(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def decode(frames: Any) -> Any:
        message = original(frames)
        unpack(message.outputs)
        return message

    return decode


def install() -> None:
    """Wrap the constructors of clients and schedulers, unless a seam of the delivery does not fit."""
    if _unexpected():
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import MPClient

    seams.wrap(MPClient, "__init__", _reading)
    seams.wrap(Scheduler, "__init__", _packing)


def _reading(make_client: Any) -> Any:
    def client(self: Any, *arguments: Any, **more: Any) -> None:
        given = inspect.signature(make_client).bind(self, *arguments, **more).arguments
        # If addresses are given, somebody else started the engine core, and it may have other readers.
        if given.get("client_addresses") or _reason_against(given["vllm_config"]):
            make_client(self, *arguments, **more)
            return
        with environment({ENVIRONMENT: str(os.getpid())}):  # inherited by the engine core that is started here
            make_client(self, *arguments, **more)
        self.decoder.decode = _unpacking(self.decoder.decode)

    return client


def _packing(make_scheduler: Any) -> Any:
    def scheduler(self: Any, *arguments: Any, **more: Any) -> None:
        make_scheduler(self, *arguments, **more)
        _attach(self)

    return scheduler
