"""Tell the ranks of a run which rank failed or hangs, where, and why.

If one rank does not reach a collective, the others wait until its timeout, and the error they then raise does not name
the reason. So every rank has a thread that writes the position of its main thread to the run's store, and that ends the
process when the store says that another rank failed. The first rank's thread also detects when no rank makes progress.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from router_replay.errors import RouterReplayError, TrainError

FAILED = "failed"
INTERVAL = 0.5
GRACE = 10.0
"""Seconds that a main thread has to leave a broken collective and close the engine before it is ended."""
HEARD = 5.0
"""Seconds that a failed rank waits for the others to get its message: torchrun ends all ranks when one has ended."""
SILENT = 45.0
"""Seconds without a report of a rank after which a message names it. The run goes on until `trainer.rank_timeout`."""
_COLLECTIVE = f"{os.sep}torch{os.sep}distributed{os.sep}"


class RankFailed(TrainError):
    """Another rank failed or hangs. This rank has already printed the message."""

    printed = True


class NoWatch:
    """Take the place of Watch in a run of one process, and do nothing."""

    agreed = False
    give_up: Callable[[], object] | None = None

    def phase(self, name: str) -> None:
        """Do nothing."""

    def beat(self) -> None:
        """Do nothing."""

    def failed(self, error: BaseException) -> BaseException:
        """Return `error`: there is no other rank to tell."""
        return error

    def close(self) -> None:
        """Do nothing."""


class Watch:
    """Watch one rank. `store` is torch's store of the run, on a connection that nothing else uses.

    `rank` is this rank of `world`. `timeout` is the setting `trainer.rank_timeout`, in seconds.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        self.agreed = False
        """True when every rank knows the failure that ends the run, so that none needs to be told."""
        self.give_up: Callable[[], object] | None = None
        """Called before this thread ends the process: it closes what must not outlive it, such as an engine."""
        self._store, self._rank, self._world, self._timeout = store, rank, world, timeout
        self._phase, self._count = "starting", 0
        self._main = threading.get_ident()
        self._raised = False
        self._ended, self._told = threading.Event(), threading.Lock()
        self._others = [other for other in range(world) if other != rank]
        self._seen = {other: _Seen() for other in range(world)}
        self._named: set[int] = set()  # the silent ranks that a message named
        self._thread = threading.Thread(target=self._watch, name="router-replay-watch", daemon=True)
        self._thread.start()

    # -- the main thread ------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """Note that this rank enters the phase `name`, which messages about it then show."""
        self._phase = name
        self.beat()

    def beat(self) -> None:
        """Note that this rank makes progress. `trainer.rank_timeout` bounds the time between two calls."""
        self._count += 1

    def failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks of `error`. Return what to raise here; another rank may have failed first."""
        if self.agreed or isinstance(error, RankFailed):
            return error
        self._raised = True
        text = f"rank {self._rank} failed in phase {self._phase!r}: {_in_words(error)}"
        try:
            first = self._tell(text, [self._rank])
        except RuntimeError:  # without the store there is no other rank to tell
            return error
        if first != text:
            self._print(first)
            return RankFailed(first)
        self._told.acquire(blocking=False)  # the caller prints the error, so this thread does not
        self._wait_until_heard()
        return error

    def close(self) -> None:
        """End the thread of the watch."""
        self._ended.set()
        self._thread.join(timeout=GRACE)

    # -- the thread -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(min(INTERVAL, self._timeout / 4)):
            try:
                self._publish()
                if self._rank == 0:
                    self._judge()
                else:
                    self._look(0)
                    self._judge_first()
                self._name_silent(self._others if self._rank == 0 else [0])
                failure = self._failure()
            except RuntimeError as error:  # of torch's store
                self._end_without_store(error)
                return
            if failure is not None:
                self._end(failure)
                return

    def _publish(self) -> None:
        waits, place = self._where()
        state = {"tick": time.monotonic(), "count": self._count, "phase": self._phase, "waits": waits, "place": place}
        self._store.set(f"rank{self._rank}", json.dumps(state))

    def _where(self) -> tuple[bool, str]:
        """Return whether the main thread is inside a collective, and its innermost line of Python."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return False, "an unknown line"
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        while frame is not None:
            if _COLLECTIVE in frame.f_code.co_filename:
                return True, place
            frame = frame.f_back
        return False, place

    def _look(self, other: int) -> None:
        if self._store.check([f"rank{other}"]):
            self._seen[other].update(json.loads(self._store.get(f"rank{other}")))

    def _judge(self) -> None:
        """On the first rank: tell all ranks when none of them made progress for `trainer.rank_timeout`."""
        for other in range(self._world):
            self._look(other)
        if min(seen.idle for seen in self._seen.values()) < self._timeout:
            return
        silent = [rank for rank, seen in self._seen.items() if seen.silent > min(GRACE, self._timeout)]
        busy = [rank for rank, seen in self._seen.items() if not seen.state.get("waits")]
        guilty = silent or busy or list(self._seen)
        named = "; ".join(f"rank {rank} {self._seen[rank].in_words()}" for rank in guilty)
        waiting = [rank for rank in self._seen if rank not in guilty]
        rest = "".join(f"; rank {rank} {self._seen[rank].in_words()}" for rank in waiting[:3])
        self._tell(f"no rank made progress for {self._timeout:g} s (trainer.rank_timeout): {named}{rest}", guilty)

    def _judge_first(self) -> None:
        if self._seen[0].silent > self._timeout:
            words = self._seen[0].in_words()
            self._tell(f"no report of rank 0 for {self._timeout:g} s (trainer.rank_timeout): rank 0 {words}", [0])

    def _name_silent(self, ranks: list[int]) -> None:
        """Print which of these ranks has not reported for `SILENT` seconds, once until it reports again."""
        for rank in ranks:
            if self._seen[rank].silent < SILENT:
                self._named.discard(rank)
            elif rank not in self._named:
                self._named.add(rank)
                self._write(
                    f"rank {rank} {self._seen[rank].in_words()}; rank {self._rank} waits for it, up to "
                    f"{self._timeout:g} s without progress (trainer.rank_timeout)"
                )

    def _tell(self, text: str, ranks: list[int]) -> str:
        """Tell the other ranks of a failure, unless one was told before. Return the text of the first failure."""
        told = self._store.compare_set(FAILED, "", json.dumps({"text": text, "ranks": ranks}))
        return str(json.loads(told)["text"])

    def _failure(self) -> dict[str, Any] | None:
        return json.loads(self._store.get(FAILED)) if self._store.check([FAILED]) else None

    def _end(self, failure: dict[str, Any]) -> None:
        """End the process, after giving the main thread time to leave by itself.

        The collective that the main thread waits in breaks when a guilty rank is gone.
        """
        self._print(failure["text"])
        with contextlib.suppress(RuntimeError):
            self._store.set(f"heard{self._rank}", "")
        hangs = self._rank in failure["ranks"] and not self._raised
        if self._ended.wait(0 if hangs else GRACE):
            return
        if hangs:
            self._wait_until_heard()
        self._exit()

    def _end_without_store(self, error: RuntimeError) -> None:
        if self._ended.wait(GRACE):  # the run is over, and the process with the store ended first
            return
        self._print(
            f"rank {self._rank} in phase {self._phase!r} lost the connection to the store of the run: the first rank "
            f"or torchrun has ended ({_in_words(error)})"
        )
        self._exit()

    def _exit(self) -> None:
        if self.give_up is not None:  # closing may hang as well
            closing = threading.Thread(target=self.give_up, daemon=True)
            closing.start()
            closing.join(GRACE)
        sys.stderr.flush()
        os._exit(1)

    def _wait_until_heard(self) -> None:
        patience = time.monotonic() + HEARD
        waiting = [f"heard{other}" for other in self._others]
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < patience and not self._store.check(waiting):
                time.sleep(0.05)

    def _print(self, text: str) -> None:
        if self._told.acquire(blocking=False):
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write(f"router-replay train: {text}\n")
        sys.stderr.flush()


class _Seen:
    """Hold what is known of one rank. All times are those of this rank's clock."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._alive = self._moved = time.monotonic()

    def update(self, state: dict[str, Any]) -> None:
        now = time.monotonic()
        if state["tick"] != self.state.get("tick"):
            self._alive = now
        if (state["count"], state["phase"]) != (self.state.get("count"), self.state.get("phase")):
            self._moved = now
        self.state = state

    @property
    def silent(self) -> float:
        """Return the seconds since the rank last reported."""
        return time.monotonic() - self._alive

    @property
    def idle(self) -> float:
        """Return the seconds since the rank last made progress."""
        return time.monotonic() - self._moved

    def in_words(self) -> str:
        if not self.state:
            return "never joined the run"
        place = f"in phase {self.state['phase']!r} at {self.state['place']}"
        if self.silent > GRACE:
            return f"has not reported for {self.silent:.0f} s, and was last seen {place}"
        return f"{'waits' if self.state['waits'] else 'is'} {place}"


def _in_words(error: BaseException) -> str:
    text = str(error).strip()
    return text if isinstance(error, RouterReplayError) and text else f"{type(error).__name__}: {text}"
