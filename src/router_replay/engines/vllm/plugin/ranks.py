"""Let every data-parallel rank answer the plugin's worker calls.

vLLM sends `collective_rpc` to the engine core of every data-parallel rank, and returns the answer of rank 0 alone. The
other ranks compute other requests and may refuse weights for reasons of their own. Here the answers of all workers of
all ranks are returned, rank by rank. This holds for `AsyncLLM.collective_rpc` and for the server's `/collective_rpc`.
Calls that are not ours keep vLLM's answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from router_replay.engines.vllm.plugin import seams

OURS = "router_replay_"  # the methods that worker.py adds begin with this


def install() -> None:
    """Wrap AsyncMPClient.collective_rpc_async, which the data-parallel clients inherit."""
    from vllm.v1.engine.core_client import AsyncMPClient

    seams.wrap(AsyncMPClient, "collective_rpc_async", _asking_all)


def _asking_all(original: Any) -> Any:
    async def collective_rpc_async(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        if not isinstance(method, str) or not method.startswith(OURS):
            answers: list[Any] = await original(self, method, timeout, args, kwargs)
            return answers
        calls = [
            self._call_utility_async("collective_rpc", method, timeout, args, kwargs, engine=engine)
            for engine in self.core_engines
        ]
        return [answer for rank in await asyncio.gather(*calls) for answer in rank]

    return collective_rpc_async
