"""Keeps the trajectories of every session, within a limit of bytes over all of them.

    sessions = Sessions(spec, max_bytes=1 << 30)
    session = sessions.get_or_open("game-7")
    with sessions.room(session, tokens=512):             # refuses, or lets read sessions go, before anything is sampled
        ...
        session.add(near, pieces, kept, ...)              # extends a trajectory, or branches it

When the limit is reached, sessions that were read (GET) and are not in use leave, the least recently used first. A
session that nobody has read never leaves by itself: new requests are refused with status 429 instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from router_replay.engines.types import Completion, Request
from router_replay.gateway.refusal import Refusal
from router_replay.spec import RouterSpec
from router_replay.stitch import Trajectory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
TOKEN_BYTES = 8 + 4 + 1 + 8  # a token, its log-prob, its place in the loss mask and its version
TURN_BYTES = 1024  # what is kept of a turn besides its tokens, and of a session besides its turns


@dataclasses.dataclass(frozen=True)
class Answered:
    """Remembers one sampled answer: the first `length` tokens of `trajectory` are its prompt and the answer."""

    trajectory: Trajectory
    length: int

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens of the prompt and the answer."""
        return self.trajectory.token_ids[: self.length]


@dataclasses.dataclass
class Counts:
    """Counts the answers of a session.

    Each of the `answers` has `started` a trajectory, `extended` one, or `branched`: it has a trajectory of its own,
    because the agent changed the history or asked the same again. `malformed_calls` are answers with a tool call that
    could not be read.
    """

    answers: int = 0
    started: int = 0
    extended: int = 0
    branched: int = 0
    malformed_calls: int = 0


class Session:
    """Holds the trajectories of one agent. `name` is that of the session, and `spec` describes the model's routers.

    `key` opens this session only, if there is one.
    """

    def __init__(self, name: str, spec: RouterSpec, key: str | None = None) -> None:
        self.name, self._spec, self._key = name, spec, key
        self.trajectories: list[Trajectory] = []
        self.finish_reasons: dict[int, str] = {}  # of the last answer of each trajectory, by its index
        self.by_messages: dict[str, Answered] = {}  # by the digest of the messages, the answer included
        self.by_text: list[tuple[str, Answered]] = []
        self.kept: dict[str, int] = {}  # how many sampled tokens of a request were kept, by its id
        self.counts = Counts()
        self.requests = 0
        self.users = 0  # requests that are being answered, or read
        self.in_flight: set[Any] = set()  # the tasks that wait for the engine
        self.closed = False
        self.was_read = False
        self.used_at = time.monotonic()
        self._text_bytes = 0

    def opened_by(self, key: bytes) -> bool:
        """Return whether `key` is the key of this session."""
        return self._key is not None and hmac.compare_digest(key, self._key.encode())

    @property
    def has_key(self) -> bool:
        """Whether this session has a key of its own."""
        return self._key is not None

    @property
    def bytes(self) -> int:
        """The bytes that this session may take. Rows that branches share are counted for each of them."""
        tokens = sum(map(len, self.trajectories))
        fixed = TURN_BYTES * (1 + self.counts.answers + len(self.trajectories))
        return fixed + tokens * bytes_per_token(self._spec) + self._text_bytes

    def nearest(self, prompt: Sequence[int]) -> tuple[Trajectory | None, int]:
        """Return the trajectory that shares the most tokens with `prompt`, and their number."""
        best, most = None, 0
        for trajectory in self.trajectories:
            shared = trajectory.common_prefix(prompt)
            # Of equals, one that the prompt extends as a whole is better than one that it would branch.
            if shared > most or (shared == most and shared and shared == len(trajectory)):
                best, most = trajectory, shared
        return best, most

    def add(
        self,
        near: Trajectory | None,
        pieces: Sequence[tuple[Request, Completion]],
        kept: int,
        finish_reason: str,
        has_history: bool,
    ) -> Answered:
        """Add one sampled answer to the trajectory `near`, or to a new one that branches from it; return where it is.

        `pieces` are the parts of the answer, more than one if weights changed meanwhile. Only the first `kept` sampled
        tokens stay. `has_history` says whether the prompt holds earlier answers.
        """
        prompt = pieces[0][0].token_ids
        shared = 0 if near is None else near.common_prefix(prompt)
        extends = near is not None and shared == len(near)
        asked_again = near is not None and (shared == len(prompt) or bool(near.loss_mask[:shared].any()))
        taken = Trajectory(self._spec) if near is None else near
        for request, completion in pieces:
            taken = taken.add(request, completion, branch=True)
        if len(taken) > len(prompt) + kept:
            taken.truncate(len(prompt) + kept)
        self.counts.answers += 1
        if extends:
            self.counts.extended += 1
        else:
            self.trajectories.append(taken)
            self.counts.branched += has_history or asked_again
            self.counts.started += not (has_history or asked_again)
        place = next(place for place, one in enumerate(self.trajectories) if one is taken)
        self.finish_reasons[place] = finish_reason
        self.was_read = False
        return Answered(taken, len(prompt) + kept)

    def remember_text(self, text: str, answered: Answered) -> None:
        """Remember the text of a prompt and its answer, for a later prompt that begins with it."""
        self.by_text.append((text, answered))
        self._text_bytes += 4 * len(text)

    def summary(self) -> dict[str, Any]:
        """Return what `GET /sessions` says of this session."""
        return {
            "id": self.name,
            **dataclasses.asdict(self.counts),
            "trajectories": len(self.trajectories),
            "tokens": sum(map(len, self.trajectories)),
            "bytes": self.bytes,
            "in_flight": len(self.in_flight),
            "was_read": self.was_read,
            "idle_seconds": round(time.monotonic() - self.used_at, 3),
        }


class Sessions:
    """Holds all sessions of a gateway. `spec` describes the routers; `max_bytes` limits all sessions together."""

    def __init__(self, spec: RouterSpec, max_bytes: int) -> None:
        self.spec, self.max_bytes = spec, max_bytes
        self.evicted = 0
        self._sessions: dict[str, Session] = {}
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def bytes(self) -> int:
        """The bytes that all sessions and the answers in progress may take."""
        return sum(session.bytes for session in self._sessions.values()) + self._reserved

    def open(self, name: str | None = None, key: str | None = None) -> Session:
        """Make a session; `name` is made up if it is None, and `key` opens this session only."""
        name = f"session-{secrets.token_hex(8)}" if name is None else name
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Refusal(
                400,
                "a session's name must have 1 to 128 letters, digits and . _ : - and begin with a letter or digit, got "
                f"{str(name)[:140]!r}",
                param="id",
            )
        if name in self._sessions:
            raise Refusal(409, f"there is already a session {name!r}: choose another name", param="id")
        self._free(TURN_BYTES, None)
        session = self._sessions[name] = Session(name, self.spec, key)
        return session

    def get_or_open(self, name: str) -> Session:
        """Return the session of this `name`, which is made if there is none."""
        return self._sessions.get(name) or self.open(name)

    def get(self, name: str) -> Session:
        """Return the session of this `name`; raise Refusal if there is none."""
        if name not in self._sessions:
            raise Refusal(
                404,
                f"there is no session {name[:140]!r}: it was never used, was deleted, or was read and left for others",
                code="session_not_found",
            )
        return self._sessions[name]

    def find(self, name: str) -> Session | None:
        """Return the session of this `name`, or None."""
        return self._sessions.get(name)

    def remove(self, name: str) -> Session:
        """Free a session. Its requests in flight end with status 409."""
        session = self.get(name)
        del self._sessions[name]
        session.closed = True
        for task in list(session.in_flight):
            task.cancel()
        return session

    def forget_if_empty(self, session: Session) -> None:
        """Remove a `session` whose only request was refused. One that was opened with a key stays."""
        if not (session.counts.answers or session.users or session.has_key):
            self._sessions.pop(session.name, None)

    def all(self) -> list[Session]:
        """Return all sessions, the least recently used first."""
        return sorted(self._sessions.values(), key=lambda session: session.used_at)

    @contextlib.contextmanager
    def room(self, session: Session, tokens: int) -> Iterator[None]:
        """Reserve the bytes of this many new `tokens` of `session` while the block runs."""
        needed = tokens * bytes_per_token(self.spec) + 2 * TURN_BYTES
        self._free(needed, session)
        self._reserved += needed
        session.used_at = time.monotonic()
        try:
            yield
        finally:
            self._reserved -= needed
            session.used_at = time.monotonic()

    def _free(self, needed: int, wanted: Session | None) -> None:
        """Let sessions go until `needed` bytes are free; raise Refusal, and let none go, if that is not enough."""
        missing = self.bytes + needed - self.max_bytes
        if missing <= 0:
            return
        going = []
        for session in self.all():
            if missing > 0 and session is not wanted and session.was_read and not session.users:
                going.append(session)
                missing -= session.bytes
        if missing > 0:
            raise Refusal(
                429,
                f"the gateway is full: {self.max_bytes} bytes over all sessions (--max-bytes), and this request may "
                f"need {needed}. Read sessions with GET /sessions/NAME or free them with DELETE, ask for fewer tokens, "
                "or raise the limit",
                code="memory_full",
            )
        for session in going:
            del self._sessions[session.name]
            session.closed = True
            self.evicted += 1


def bytes_per_token(spec: RouterSpec) -> int:
    """Return the bytes that a token and its row take."""
    layers, top_k = spec.row_shape
    return TOKEN_BYTES + layers * top_k * np.dtype(spec.dtype).itemsize
