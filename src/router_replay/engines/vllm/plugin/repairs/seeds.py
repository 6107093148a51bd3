"""Keep seeded sampling working on vLLM's CPU backend when a prompt is computed in several steps.

After each step, vLLM rewinds the random generator of an unfinished prompt by four, because the token drawn for it is
discarded. CPU generators cannot be rewound, and the engine stops ("CPU Generator does not use offset", vLLM 0.28 to
0.30). Here such a request has no generator of its own during that step: the discarded token is drawn from the shared
generator, and the request's own generator does not advance.
"""

from __future__ import annotations

from typing import Any


class HeldGenerators:
    """Hide and restore generators around the runner's `_prepare_inputs`: `give_back` before it, `hold` after it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._held: list[str] = []

    def give_back(self) -> None:
        """Restore the held generators. Requests are found by name, because the batch may have been condensed since."""
        batch = self._runner.input_batch
        for name in self._held:
            index, request = batch.req_id_to_index.get(name), self._runner.requests.get(name)
            if index is not None and request is not None:
                batch.generators[index] = request.generator
        self._held = []

    def hold(self) -> None:
        """Hide the generators of requests whose token of this step will be discarded."""
        batch = self._runner.input_batch
        if not batch.generators:
            return
        thrown_away = self._runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        for index in thrown_away:
            if batch.generators.pop(index, None) is not None:
                self._held.append(batch.req_ids[index])
