"""Play episodes without an end, each in a task of its own, beside a trainer that takes finished groups from them.

    with RolloutStream(engine, task, config, journal, state, finished, version=0) as stream:
        groups = stream.take(version=0)          # waits until a step's groups are ready
        ...                                      # train; episodes go on meanwhile
        stream.new_weights(1, load)              # cancels what will be too old, then calls load(in_flight)

This is the side of the trainer's thread. All tasks and all state live on one event loop in another one (`rollouts.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from router_replay.engines.base import Engine
from router_replay.engines.types import InFlight
from router_replay.rl.config import TrainConfig
from router_replay.rl.environments.base import Task
from router_replay.rl.rollout.evaluation import Evaluation, EvaluationResult
from router_replay.rl.rollout.ledger import Ledger, StreamState
from router_replay.rl.rollout.order import TRAINER, Order
from router_replay.rl.rollout.player import Episode, Keep
from router_replay.rl.rollout.rollouts import Rollouts
from router_replay.rl.state.journal import Journal

T = TypeVar("T")


class RolloutStream:
    """Play groups of episodes from the problems of `task` until it is closed.

    `state` and `finished` come from the checkpoint and its journal. `version` is the engine's. `on_turn` is called
    after each turn. `order` records the order of events, or decides it. `keep` puts the rows of finished episodes
    away. If a task fails, `take` raises its error.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        config: TrainConfig,
        journal: Journal,
        state: StreamState,
        finished: Sequence[tuple[int, int, Episode]] = (),
        *,
        version: int,
        on_turn: Callable[[], object] = lambda: None,
        order: Order | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._engine, self._keeps = engine, config.asynchronous.on_new_weights == "keep"
        self._order, self._journal = Order() if order is None else order, journal
        threads = config.asynchronous.environment_threads
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "router-replay-env")
        self._rollouts = Rollouts(
            engine, task, config, journal, state, finished,
            version=version, on_turn=on_turn, order=self._order, pool=self._pool, keep=keep,
        )  # fmt: skip
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="router-replay-rollouts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if self._order.notes:  # only for an embedded engine
            self._order.attach(self._loop, self._engine.obey(self._order))  # type: ignore[attr-defined]
        self._call(self._rollouts.start())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def ledger(self) -> Ledger:
        """Return the counts of episodes."""
        return self._rollouts.ledger

    def take(self, version: int) -> list[Episode]:
        """Wait until the groups for the update of `version` are ready, and return their episodes."""
        return self._call(self._rollouts.take(version))

    def new_weights(self, version: int, load: Callable[[InFlight], None]) -> None:
        """Count the groups that were taken as trained, and give the engine the weights of `version` by `load`.

        An evaluation in progress is waited for, so that all of it has the weights it began with. What will be too old
        is cancelled. `load` gets what to do with the requests in flight.
        """
        cancelled = self._call(self._rollouts.before_weights(version))
        if cancelled:
            self._call(self._order.turn(TRAINER))
            self._engine.abort(cancelled)
        self._call(self._order.turn(TRAINER))
        load("keep" if self._keeps else "abort")
        self._call(self._rollouts.after_weights(version))

    def evaluate(self, evaluation: Evaluation) -> None:
        """Begin to play an evaluation with the current weights, beside the rollouts."""
        self._call(self._rollouts.evaluate(evaluation))

    def evaluated(self) -> EvaluationResult | None:
        """Wait for the evaluation that was begun, and return its result; None if there is none, or it was returned."""
        return self._call(self._rollouts.evaluated())

    def snapshot(self, step: int) -> StreamState:
        """Start the journal's segment of `step`, and return the state for its checkpoint."""
        return self._call(self._rollouts.snapshot(step))

    def begin_journal(self, step: int) -> None:
        """Start the journal again from the checkpoint of `step`, before `__enter__`."""
        self._rollouts.begin_journal(step)
        self._journal.forget_after(step)

    def prune_journal(self, oldest: int) -> None:
        """Remove what no checkpoint from step `oldest` on needs."""
        self._journal.prune(oldest)

    def figures(self) -> dict[str, float]:
        """Return the metrics of the stream since the last call; counts of episodes are those of the whole run."""
        return self._call(self._rollouts.values())

    def stop(self) -> None:
        """Cancel all episodes in progress. Finished ones stay in the journal; unfinished ones are counted as dropped.

        A resumed run plays the groups of both to their end.
        """
        if not self._stopped:
            self._stopped = True
            self._call(self._rollouts.stop())

    def close(self) -> None:
        """Stop, and end the thread."""
        if self._thread.is_alive():
            self.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._journal.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
