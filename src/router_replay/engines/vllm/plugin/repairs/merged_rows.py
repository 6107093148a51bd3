"""Keep the routes of an answer when vLLM merges two parts of it.

A client that reads parts of an answer (deltas) gets two of them as one if it was slow. vLLM up to 0.30 merges tokens
and log-probs and drops `routed_experts`, which come with the last part. Dynamo's worker reads this way: some answers
then have no rows, more of them under load. vLLM 0.31 keeps the rows itself.
"""

from __future__ import annotations

from typing import Any

from router_replay.engines.vllm.plugin import seams


def install() -> None:
    """Wrap RequestOutput.add, in the process that reads the answers."""
    from vllm.outputs import RequestOutput

    seams.wrap(RequestOutput, "add", _keeping)


def _keeping(original: Any) -> Any:
    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        original(self, next_output, aggregate)
        if not aggregate:  # vLLM replaces the older part with the newer one, which has the rows
            return
        for later in next_output.outputs:
            for mine in self.outputs:
                if mine.index == later.index and later.routed_experts is not None:
                    mine.routed_experts = later.routed_experts

    return add
