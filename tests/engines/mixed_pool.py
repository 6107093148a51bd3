"""A pool with members of two kinds: it plays and trains on both, and what a killed member had ends on the other."""

from __future__ import annotations

import asyncio
import json
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from router_replay.engines import Completion, Engine, EnginePool, Request, Sampling
from router_replay.rl.config import load_config
from router_replay.rl.log.metrics import read_metrics
from router_replay.rl.loop.train import train
from router_replay.routes import Routes
from tests.engines.conftest import one

TURN = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
STEPS, KILLED_AT = 4, 2
FAR = 1e-6  # with this learning rate, k3 between a policy and its next version is larger; that of rounding is smaller


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


def check_that_training_goes_on(
    tables: Sequence[str],
    model: str,
    words: Sequence[str],
    kill: Callable[[], None],
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
) -> str:
    """Train with these `[[engines]]`, and kill the last one when it has requests of the third policy.

    `tables` are their settings as `load_config` takes them, `words` those of the prompts, and `more` other settings. No
    token may be older than the policy that it trains, so a member without the newest weights shows as mismatch.
    Returns what was seen.
    """
    doomed, reports = f"engine{len(tables) - 1}", list[dict[str, dict[str, Any]]]()
    load = EnginePool.update_weights

    def kill_in_the_middle(pool: EnginePool) -> None:
        while not pool.report()[doomed]["running"]:
            time.sleep(0.001)
        kill()

    def noting(pool: EnginePool, source: Any, version: int, *more: Any) -> None:
        load(pool, source, version, *more)
        reports.append(pool.report())
        if version == KILLED_AT:
            threading.Thread(target=kill_in_the_middle, args=(pool,), daemon=True).start()

    monkeypatch.setattr(EnginePool, "update_weights", noting)
    problems = folder / "problems.jsonl"
    prompts = [" ".join(words[first : first + 3]) for first in range(8)]
    problems.write_text("\n".join(json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts))
    config = load_config(
        None,
        [
            f"output={folder / 'run'}", f"model.path={model}", f"engines=[{', '.join(tables)}]", "loop=async",
            f"steps={STEPS}", "asynchronous.max_staleness=0", "asynchronous.on_new_weights=recompute",
            "environment.kind=jsonl", f"environment.file={problems}",
            "environment.reward=tests.dynamo_real.rewards:even_tokens", "rollout.prompts=4", "rollout.group=4",
            "rollout.max_tokens=48", "trainer.max_tokens=512", "optimizer.lr=3e-3", "logging.tensorboard=false",
            *more,
        ],
    )  # fmt: skip
    train(config)
    lines = read_metrics(folder / "run")
    assert [line["episodes/trained"] for line in lines] == [16 * (step + 1) for step in range(STEPS)]
    for line in lines:
        assert line["routes/live"] == 0
        assert line["async/staleness_max"] == 0
        counts = {name: value for name, value in line.items() if name.startswith("episodes/")}
        assert 2 * counts["episodes/admitted"] == sum(counts.values())  # every episode is in one of the other counts
        assert not counts["episodes/dropped_environment"]
    before, last = reports[KILLED_AT - 1], reports[-1]
    assert {facts["version"] for facts in before.values()} == {KILLED_AT}
    assert all(facts["served"] for facts in before.values())
    assert [name for name, facts in last.items() if facts["lost"]] == [doomed]
    gaps = [line["mismatch/k3"] for line in lines]
    assert max(gaps) < FAR, gaps
    kinds = " and ".join(facts["kind"] for facts in before.values())
    return f"{STEPS} steps on {kinds}, the last killed in the middle: all episodes counted, k3 at most {max(gaps):.0e}"
