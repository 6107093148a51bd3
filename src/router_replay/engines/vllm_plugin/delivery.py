"""How rows come from vLLM's engine core to the process that asked: one array for each step, not one for each request.

While requests decode, each has one new row in every step, and vLLM sends each as an array of its own: at 256
requests most of what capture costs. Here the one-row arrays of a step are laid into one, which travels with the
first of them and is taken apart where the message is read:

    sent by vLLM       a: [1, L, K]      b: [1, L, K]      c: [512, L, K] (a prompt)
    sent here          a: [2, 1, L, K]   b: nothing        c: [512, L, K]

The process that starts an engine core and reads its messages asks for that by an environment variable, so nothing is
packed that nobody takes apart. All else, and whatever is not as expected, is left to vLLM.

vLLM also lists the blocks of every request in every step, to read the rows of a prompt from when the prompt is
done. Here only requests that have no token yet are listed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from router_replay.engines.vllm_samples import refuse_version
from router_replay.errors import EngineError, RouterReplayError

# "1" in an engine core whose reader takes packed rows apart. Set to "0" by a user, all is left to vLLM.
ENVIRONMENT = "ROUTER_REPLAY_VLLM_PACKED"


def state(vllm_config: Any) -> str:
    """For the plugin's report, in any process of an engine: "packed", or why rows come as vLLM sends them."""
    reason = _reason_against(vllm_config)
    if not reason and os.environ.get(ENVIRONMENT) != "1":
        reason = "the process that reads the engine's messages did not ask for packed rows"
    return reason or "packed"


def _reason_against(vllm_config: Any) -> str:
    if os.environ.get(ENVIRONMENT) == "0":
        return f"switched off ({ENVIRONMENT}=0)"
    if not vllm_config.model_config.enable_return_routed_experts:
        return "capture is off"
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "data parallelism"
    return _unexpected()


@functools.cache
def _unexpected() -> str:
    """What of vLLM's inside is not as it was read, or nothing."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core_client import MPClient

    try:
        refuse_version(vllm.__version__)
    except RouterReplayError as error:
        return str(error)
    there = {
        "EngineCoreOutput": {"routed_experts", "new_token_ids"} <= set(EngineCoreOutput.__struct_fields__),
        "MPClient": {"vllm_config", "client_addresses"} <= set(inspect.signature(MPClient.__init__).parameters),
        "Scheduler": all(hasattr(Scheduler, name) for name in ("update_from_output", "_update_after_schedule")),
    }
    return ", ".join(f"vLLM's {name} is not as expected" for name, found in there.items() if not found)


# -- the engine core --------------------------------------------------------------------------------


def pack(outputs: Sequence[Any]) -> None:
    """Lay the single rows of one message into an array that travels with the first of them."""
    single = []
    for output in outputs:
        rows = output.routed_experts
        if rows is None:
            if output.new_token_ids:
                return  # the reader would take it for one whose row is packed
        elif len(rows) == 1:
            single.append(output)
    if len(single) < 2:
        return
    packed = np.concatenate([output.routed_experts for output in single])
    for output in single:
        output.routed_experts = None
    single[0].routed_experts = packed[:, None]


def _packing(original: Callable[..., dict[int, Any]]) -> Callable[..., dict[int, Any]]:
    @functools.wraps(original)
    def update_from_output(*arguments: Any, **more: Any) -> dict[int, Any]:
        messages = original(*arguments, **more)
        for message in messages.values():
            pack(message.outputs)
        return messages

    return update_from_output


def _listing_prompts_only(scheduler: Any) -> Callable[[Any], None]:
    original = scheduler._update_after_schedule

    @functools.wraps(original)
    def update_after_schedule(scheduler_output: Any) -> None:
        # This attribute has no other reader in there than the list of blocks.
        scheduler.enable_return_routed_experts = False
        try:
            original(scheduler_output)
        finally:
            scheduler.enable_return_routed_experts = True
        group = scheduler.routed_experts_mgr.attn_gid
        for name in scheduler_output.num_scheduled_tokens:
            request = scheduler.requests[name]
            # A resumable request may lose its tokens to a longer prompt while a step of it is under way.
            if not request.num_output_tokens or request.resumable:
                blocks = scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
                scheduler._re_block_ids[name] = blocks[group]

    return update_after_schedule


def _attach(scheduler: Any) -> None:
    if _reason_against(scheduler.vllm_config) or not hasattr(scheduler, "_re_block_ids"):
        return
    scheduler._update_after_schedule = _listing_prompts_only(scheduler)
    if os.environ.get(ENVIRONMENT) == "1":
        scheduler.update_from_output = _packing(scheduler.update_from_output)


# -- the process that reads -------------------------------------------------------------------------


def unpack(outputs: Sequence[Any]) -> None:
    """Give every output of a message its row again. A message that was not packed stays as it is."""
    carrier = next((one for one in outputs if one.routed_experts is not None and one.routed_experts.ndim == 4), None)
    if carrier is None:
        return
    packed = carrier.routed_experts
    single = [one for one in outputs if one is carrier or (one.routed_experts is None and one.new_token_ids)]
    if len(single) != len(packed):
        raise EngineError(
            f"a message of vLLM's engine core has {len(packed)} packed rows for {len(single)} requests; "
            f"{ENVIRONMENT}=0 leaves rows to vLLM"
        )
    for output, row in zip(single, packed, strict=True):
        output.routed_experts = row.copy()  # a view would keep the whole step's message as long as its longest request


def _unpacking(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def decode(frames: Any) -> Any:
        message = original(frames)
        unpack(message.outputs)
        return message

    return decode


@contextmanager
def _asked_for() -> Iterator[None]:
    """In the environment of the engine core that is started inside the block."""
    before = os.environ.get(ENVIRONMENT)
    os.environ[ENVIRONMENT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENVIRONMENT]
        else:
            os.environ[ENVIRONMENT] = before


def install() -> None:
    """Wrap the making of clients and of schedulers, once per process; objects that are not ours to change stay."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import MPClient

    if getattr(MPClient.__init__, "router_replay", False):
        return
    make_client, make_scheduler = MPClient.__init__, Scheduler.__init__

    @functools.wraps(make_client)
    def client(self: Any, *arguments: Any, **more: Any) -> None:
        given = inspect.signature(make_client).bind(self, *arguments, **more).arguments
        # With addresses somebody else started the engine core, for more readers than this one.
        if given.get("client_addresses") or _reason_against(given["vllm_config"]):
            make_client(self, *arguments, **more)
            return
        with _asked_for():
            make_client(self, *arguments, **more)
        self.decoder.decode = _unpacking(self.decoder.decode)

    @functools.wraps(make_scheduler)
    def scheduler(self: Any, *arguments: Any, **more: Any) -> None:
        make_scheduler(self, *arguments, **more)
        _attach(self)

    client.router_replay = True  # type: ignore[attr-defined]
    MPClient.__init__ = client
    Scheduler.__init__ = scheduler
