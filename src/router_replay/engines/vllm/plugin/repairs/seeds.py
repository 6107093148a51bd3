"""Seeded samples whose prompt is computed in several steps, on vLLM's CPU.

After each step vLLM winds the random numbers of a prompt that is not through back by four, since the token drawn for
it is thrown away. Generators of the CPU cannot be wound back, and the engine ends ("CPU Generator does not use
offset", vLLM 0.28 to 0.30). Here such a request has no generator of its own during that step: what is thrown away is
drawn by the common one, and its own random numbers stay where they are.
"""

from __future__ import annotations

from typing import Any


class HeldGenerators:
    """Around the runner's `_prepare_inputs`: `give_back` before it, `hold` after it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._held: list[str] = []

    def give_back(self) -> None:
        """The batch may have been condensed since: requests are found by their names."""
        batch = self._runner.input_batch
        for name in self._held:
            index, request = batch.req_id_to_index.get(name), self._runner.requests.get(name)
            if index is not None and request is not None:
                batch.generators[index] = request.generator
        self._held = []

    def hold(self) -> None:
        batch = self._runner.input_batch
        if not batch.generators:
            return
        thrown_away = self._runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        for index in thrown_away:
            if batch.generators.pop(index, None) is not None:
                self._held.append(batch.req_ids[index])
