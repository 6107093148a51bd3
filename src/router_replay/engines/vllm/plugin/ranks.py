"""Return the answers of all data-parallel ranks to the plugin's worker calls.

vLLM runs a worker call on every data-parallel rank, and returns the answer of the first rank only. The other ranks'
refusals and the progress of their requests would be lost, and with it the policy versions of these requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from router_replay.engines.vllm.plugin import seams

OURS = "router_replay_"  # the names of the plugin's worker calls begin with this


def install() -> None:
    """Wrap the worker call of the client that spreads requests over data-parallel ranks."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    seams.wrap(DPLBAsyncMPClient, "collective_rpc_async", _asking_all)


def _asking_all(original: Any) -> Any:
    async def collective_rpc_async(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        if not (isinstance(method, str) and method.startswith(OURS)):
            return list(await original(self, method, timeout, args, kwargs))
        ranks = [
            self._call_utility_async("collective_rpc", method, timeout, args, kwargs, engine=engine)
            for engine in self.core_engines
        ]
        return [answer for answers in await asyncio.gather(*ranks) for answer in answers]

    return collective_rpc_async
