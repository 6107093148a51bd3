"""Gateway: answers a client's request with an engine, and keeps what the trainer needs of it in the session.

    gateway = Gateway(engine, tokenizer)
    plan = gateway.plan(session, read_chat(body))        # the prompt's tokens; refuses what cannot be asked
    answer = await gateway.run(plan)                     # samples, stitches, and returns text without routes

One event loop calls all of this. Only `run` waits, and it stores an answer in one piece or not at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from router_replay.engines import checks
from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request, Sampling
from router_replay.errors import EngineError
from router_replay.gateway.chat import Chat, digests
from router_replay.gateway.fields import Ask, read_chat
from router_replay.gateway.refusal import Refusal
from router_replay.gateway.sessions import Session, Sessions
from router_replay.gateway.tools import Written, read_calls
from router_replay.routes import Routes
from router_replay.stitch import Trajectory

MAX_BYTES = 4 << 30
RESUMES = 1000  # how often an answer may be interrupted by new weights

Pieces = list[tuple[Request, Completion]]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Holds a request that was accepted: what the client asked, and the engine's `request`.

    `near` is the trajectory that shares the most tokens with the prompt. `text` is the text of the prompt.
    """

    session: Session
    ask: Ask
    request: Request
    near: Trajectory | None
    text: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """Holds one sample for the client: what the model wrote, why it ended, and its tokens with their log-probs."""

    written: Written
    finish_reason: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    sampled: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """Holds the reply to a client: its `choices`, and the number of prompt tokens."""

    choices: tuple[Choice, ...]
    prompt_tokens: int


class Gateway:
    """Answers requests with an `engine` and the `tokenizer` of its model.

    `max_length` limits the tokens of prompt and answer together. `max_tokens` is the limit of an answer for which the
    client gives none; by default only `max_length` limits it. `temperature` and `top_p`, if given, are used whatever a
    client asks, and `max_turns` limits the requests of a session. `end_token_ids` are the tokens with which the model
    ends a sequence, besides the tokenizer's. `model` is the name that replies carry. `max_bytes` limits all sessions
    together. `has_logprobs` says whether clients may ask for log-probs.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        max_length: int,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_turns: int | None = None,
        end_token_ids: Sequence[int] = (),
        model: str = "router-replay",
        max_bytes: int = MAX_BYTES,
        has_logprobs: bool = True,
    ) -> None:
        Sampling(max_tokens or 1, temperature or 0.0, 1.0 if top_p is None else top_p).check("the gateway")
        checks.integer(max_length, "max_length", 2, checks.TOKEN_LIMIT)
        checks.integer(max_bytes, "max_bytes", 1, 1 << 62)
        if max_turns is not None:
            checks.integer(max_turns, "max_turns", 1, checks.TOKEN_LIMIT)
        self.engine, self.model = engine, model
        self.chat = Chat(tokenizer, end_token_ids)
        self.sessions = Sessions(engine.spec, max_bytes)
        self._max_length, self._max_tokens, self._max_turns = max_length, max_tokens, max_turns
        self._temperature, self._top_p, self._has_logprobs = temperature, top_p, has_logprobs

    # -- before the engine is asked -----------------------------------------------------------------

    def plan(self, session: Session, ask: Ask) -> Plan:
        """Return the plan of what a client asked in `session`, `ask`; raise Refusal if it cannot be asked."""
        if self._max_turns is not None and session.requests >= self._max_turns:
            raise Refusal(
                400,
                f"session {session.name!r} has had its {self._max_turns} turns: end the episode",
                code="turn_limit",
            )
        if ask.logprobs and not self._has_logprobs:
            raise Refusal(400, "this gateway has no log-probs for its clients: leave logprobs out", param="logprobs")
        prompt, text = self._chat_prompt(session, ask) if ask.is_chat else self._text_prompt(session, ask)
        room = self._max_length - len(prompt)
        if not prompt or room < 1:
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} tokens; at least one, and at most {self._max_length - 1}, are possible: "
                f"prompt and answer together may have {self._max_length}",
                param="messages" if ask.is_chat else "prompt",
                code="context_length_exceeded",
            )
        near, _ = session.nearest(prompt)
        known = 0 if near is None else near.start_for(prompt)
        routes = near.routes[:known] if near is not None and known else None
        session.requests += 1
        request = Request(
            tuple(prompt),
            self._sampling(ask, min(ask.max_tokens or self._max_tokens or room, room)),
            known if self.engine.capabilities.start else 0,
            id=f"{session.name}#{session.requests}",
            known_routes=routes,
        )
        return Plan(session, ask, request, near, text)

    def _sampling(self, ask: Ask, max_tokens: int) -> Sampling:
        asked = (self._temperature, ask.temperature, 1.0), (self._top_p, ask.top_p, 1.0)
        temperature, top_p = (next(value for value in values if value is not None) for values in asked)
        encoded = [self.chat.encode(text) for text in ask.stop]
        stops = [tokens[0] for tokens in encoded if len(tokens) == 1]
        ends = self.chat.end_token_ids if ask.is_chat else ()
        return Sampling(max_tokens, temperature, top_p, ask.seed, tuple(dict.fromkeys([*ends, *stops])), n=ask.n)

    def _chat_prompt(self, session: Session, ask: Ask) -> tuple[list[int], str]:
        text = self.chat.render(ask.messages, ask.tools, ask.template)
        for place, digest in reversed(list(enumerate(digests(ask.messages)))):
            answered = session.by_messages.get(digest)
            if answered is not None:
                tokens = answered.token_ids.tolist()
                prompt = self.chat.continued(tokens, place, ask.messages, text, ask.tools, ask.template)
                if prompt is not None:
                    return prompt, text
        return self.chat.encode(text), text

    def _text_prompt(self, session: Session, ask: Ask) -> tuple[list[int], str]:
        if not isinstance(ask.prompt, str):
            wrong = [token for token in ask.prompt if not 0 <= token < (self.engine.vocabulary or 1 << 31)]
            if wrong:
                raise Refusal(400, f"prompt: the vocabulary has no token {wrong[0]}", param="prompt")
            return list(ask.prompt), self.chat.decode(ask.prompt)
        fitting = [(text, answered) for text, answered in session.by_text if ask.prompt.startswith(text)]
        if fitting:
            text, answered = max(fitting, key=lambda one: len(one[0]))
            return [*answered.token_ids.tolist(), *self.chat.encode(ask.prompt[len(text) :])], ask.prompt
        return self.chat.encode_first(ask.prompt), ask.prompt

    # -- with the engine ----------------------------------------------------------------------------

    async def run(self, plan: Plan) -> Answer:
        """Sample the answer of a plan and add it to the session; raise Refusal or EngineError if that fails."""
        session, request = plan.session, plan.request
        shared = 0 if plan.near is None else plan.near.common_prefix(request.token_ids)
        # A branch copies the tokens of its prefix, and every sample but one is a branch.
        tokens = len(request.token_ids) + request.sampling.max_tokens
        extends = plan.near is not None and shared == len(plan.near)
        with self.sessions.room(session, request.sampling.n * tokens - (shared if extends else 0)):
            task = asyncio.ensure_future(self._samples(plan))
            session.in_flight.add(task)
            try:
                samples = await task
            except asyncio.CancelledError:
                if session.closed and task.cancelled():
                    raise Refusal(409, f"session {session.name!r} was deleted", code="session_deleted") from None
                task.cancel()  # the client left; the engine stops too
                raise
            finally:
                session.in_flight.discard(task)
            return self._stored(plan, samples)

    async def _samples(self, plan: Plan) -> list[Pieces]:
        request = plan.request
        completions = await self.engine.submit(request)
        return list(await asyncio.gather(*(self._finished(request, one) for one in completions)))

    async def _finished(self, request: Request, completion: Completion) -> Pieces:
        """Return the pieces of a sample. If new weights ended it early, it goes on with the experts it had."""
        pieces: Pieces = []
        tokens, rows = list(request.token_ids), request.known_routes or Routes.missing(0, self.engine.spec)
        for number in range(RESUMES):
            sampled, left = len(completion.token_ids), request.sampling.max_tokens - len(completion.token_ids)
            aborted = completion.finish_reason == "abort" and left > 0
            if sampled or not aborted:
                pieces.append((request, completion))
            if not aborted:
                return pieces
            if sampled:
                tokens += completion.token_ids.tolist()
                rows = Routes.concat([rows[: completion.start], completion.routes])
            can = self.engine.capabilities
            sampling = dataclasses.replace(
                request.sampling, n=1, max_tokens=left, seed=_next_seed(request.sampling.seed, completion.index)
            )
            request = Request(
                tuple(tokens),
                sampling,
                min(len(rows), len(tokens) - 1) if can.start else 0,
                rows if can.forced_routes and pieces else None,
                id=f"{request.id.partition('+')[0]}+{completion.index}.{number}",
                known_routes=rows,
            )
            [completion] = await self.engine.submit(request)
        raise EngineError(f"{request.id}: the engine ended this answer early {RESUMES} times")

    # -- after the engine has answered --------------------------------------------------------------

    def _stored(self, plan: Plan, samples: Sequence[Pieces]) -> Answer:
        session, near, choices = plan.session, plan.near, []
        has_history = any(message["role"] == "assistant" for message in plan.ask.messages)
        before = digests(plan.ask.messages)[-1:] if plan.ask.is_chat else []
        for pieces in samples:
            tokens = [int(token) for _, completion in pieces for token in completion.token_ids]
            finish_reason = pieces[-1][1].finish_reason
            kept, text = self._until_stop(tokens, plan.ask)
            if kept is None:
                kept = len(tokens)
            else:
                finish_reason = "stop"
            answered = session.add(near, pieces, kept, finish_reason, has_history)
            near = answered.trajectory
            session.kept[plan.request.id] = kept
            written = read_calls(text) if plan.ask.tools else Written(text)
            session.counts.malformed_calls += written.malformed
            if before:
                reply = read_chat({"messages": [written.message()]}).messages
                session.by_messages[digests([*plan.ask.messages, *reply])[-1]] = answered
            else:
                session.remember_text(plan.text + self.chat.decode(tokens[:kept]), answered)
            logprobs = [float(value) for _, completion in pieces for value in completion.logprobs]
            choices.append(
                Choice(
                    written,
                    "tool_calls" if written.calls else "length" if finish_reason == "abort" else finish_reason,
                    tuple(self.chat.decode([token]) for token in tokens[:kept]) if plan.ask.logprobs else (),
                    tuple(logprobs[:kept]) if plan.ask.logprobs else (),
                    kept,
                )
            )
        return Answer(tuple(choices), len(plan.request.token_ids))

    def _until_stop(self, tokens: list[int], ask: Ask) -> tuple[int | None, str]:
        """Return how many tokens it takes to write the first stop text, or None, and the text before it."""
        special = ask.tools is not None  # the marks of a tool call may be special tokens
        text = self.chat.decode(self.chat.without_end(tokens), special)
        places = [text.find(stop) for stop in ask.stop]
        first = min((place for place in places if place >= 0), default=None)
        if first is None:
            return None, text
        low, high = 1, len(tokens)
        while low < high:  # the shortest beginning that has a stop text
            middle = (low + high) // 2
            written = self.chat.decode(tokens[:middle], special)
            low, high = (low, middle) if any(stop in written for stop in ask.stop) else (middle + 1, high)
        return low, text[:first]


def _next_seed(seed: int | None, index: int) -> int | None:
    """Return another seed for the rest of an answer: with the same one it would repeat the draws of its beginning."""
    return None if seed is None else (seed + (index + 1) * 1_000_003) % (1 << 62)
