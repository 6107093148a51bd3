"""The engine of an agent environment's gateway: each request goes to its episode, and the run samples the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import queue
from collections.abc import Iterable

from router_replay.engines.base import Engine, WeightSource
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.errors import EngineError
from router_replay.gateway.refusal import Refusal
from router_replay.rl.environments.base import Limits
from router_replay.spec import RouterSpec

NO_ROUTES = RouterSpec(num_experts=2, top_k=1, layers=(0,))  # the run has the rows; the gateway keeps none


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """Hold a request of the program, and the future that its answer goes to."""

    request: Request
    answer: concurrent.futures.Future[list[int]]


@dataclasses.dataclass(frozen=True)
class Ended:
    """Hold the end of a program: its exit status and what it printed."""

    status: int
    output: str
    errors: str


class Policy(Engine):
    """Stand for the policy in the gateway: every request waits for the tokens that the run samples for it."""

    def __init__(self, limits: Limits) -> None:
        self.spec, self.version, self.vocabulary = NO_ROUTES, 0, None
        self.capabilities = Capabilities(routes=False, forced_routes=False, start=False, versions=False)
        self.playing: dict[str, queue.Queue[Asked | Ended]] = {}  # by the name of the session
        self._limits = limits

    async def submit(self, request: Request) -> list[Completion]:
        """Hand the request to its episode, and return the tokens of the run."""
        if request.sampling.n > 1:
            raise Refusal(400, "n must be 1: an episode has one answer to a question", param="n")
        events = self.playing.get(request.id.rpartition("#")[0])
        if events is None:
            raise Refusal(400, "this episode has ended", code="episode_ended")
        answer: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
        events.put(Asked(request, answer))
        sampled = await asyncio.wrap_future(answer)
        room = min(self._limits.max_tokens, self._limits.max_length - len(request.token_ids))
        tokens = sampled[: request.sampling.max_tokens]
        ended = tokens[-1:] and tokens[-1] in request.sampling.stop_token_ids
        cut = len(tokens) < len(sampled) or (len(sampled) >= room and not ended)
        return [
            Completion.assemble(
                request,
                0,
                spec=self.spec,
                token_ids=tokens,
                logprobs=[0.0] * len(tokens),
                routes=None,
                versions=[0] * len(tokens),
                finish_reason="length" if cut else "stop",
            )
        ]

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Raise: the run aborts its own requests."""
        raise EngineError("the policy of an agent environment is controlled by the run")

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Raise: the run pauses its own engine."""
        self.abort()

    def resume(self) -> None:
        """Raise: the run resumes its own engine."""
        self.abort()

    def update_weights(self, source: WeightSource, version: int, in_flight: InFlight = "abort") -> None:
        """Raise: the run gives its engine new weights."""
        self.abort()

    def close(self) -> None:
        """Do nothing."""
