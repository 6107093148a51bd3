"""A pool with members of two kinds: requests spread over both, and those of a killed member end on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router_replay.engines import Completion, Engine, EnginePool, Request, Sampling
from router_replay.routes import Routes
from tests.engines.conftest import one

TURN = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def check_that_nothing_is_lost(
    doomed: Engine, other: Engine, kill: Callable[[], None], prompt: Callable[[int], tuple[int, ...]], length: int
) -> str:
    """Play first turns on both, kill `doomed` in the middle of answers, and play the second turns on `other`.

    `other` must be able to force routes; `length` is that of the long answers. Returns what was seen, in words.
    """
    with EnginePool({"doomed": doomed, "other": other}, health_seconds=0.5, slack=0) as pool:
        first = [one(pool, Request(prompt(seed), TURN)) for seed in range(4)]
        served = {name: facts["served"] for name, facts in pool.report().items()}
        assert served == {"doomed": 2, "other": 2}

        async def play() -> list[list[Completion]]:
            long = Sampling(max_tokens=length, ignore_eos=True)
            tasks = [asyncio.create_task(pool.submit(Request(prompt(seed), long))) for seed in range(10, 16)]
            while not all(facts["running"] == 3 for facts in pool.report().values()):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(kill)
            return await asyncio.gather(*tasks)

        answers: list[Any] = asyncio.run(play())
        assert [len(completion.token_ids) for [completion] in answers] == [length] * 6
        assert all(completion.routes.all_captured for [completion] in answers)
        report = pool.report()
        assert report["doomed"]["lost"]
        assert report["other"]["served"] == 2 + 6
        # The second turn of an episode whose first one the dead engine played. Its recorded rows are made others than
        # the other engine would choose, so that they come back only if they were forced.
        spec = pool.spec
        for seed, turn in enumerate(first[:2]):
            tokens = (*prompt(seed), *turn.token_ids.tolist(), 7)
            recorded = Routes((turn.routes.ids.astype(int) + 1) % spec.num_experts, spec)
            pool._prefixes.remember(tokens[:-1], "doomed")
            again = one(pool, Request(tokens, TURN, known_routes=recorded))
            assert again.routes[: len(recorded)].same_sets(recorded)
            assert len(again.token_ids) == TURN.max_tokens
        assert report["other"]["served"] + 2 == pool.report()["other"]["served"]
    return "requests spread over both, 3 in flight end on the other member, the next turns have their rows forced there"
