"""Writes requests for the two HTTP routes of vLLM that take and return token ids, and reads their answers.

`/inference/v1/generate` is made for token ids; from vLLM 0.30 on, a server has it only with --enable-scale-out.
`/v1/completions` is on every server, and takes and returns token ids too.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from router_replay import wire
from router_replay.engines.backend import Flight
from router_replay.engines.http import TokenId, decoded
from router_replay.engines.types import Request
from router_replay.engines.vllm.requests import completions_arguments, sampling_arguments
from router_replay.engines.vllm.samples import Sample
from router_replay.errors import EngineError
from router_replay.routes import Routes, row_count
from router_replay.spec import RouterSpec

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
GENERATE_COLLECTS = (0, 29)  # the first version whose generate route waits for all samples of a request by itself
FINAL_ONLY = 2  # vLLM's RequestOutputKind
COMPLETIONS_CUT_ROWS = (0, 28)  # the first version whose /v1/completions takes routed_experts_prompt_start


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Content(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _TokenLogprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None


L = TypeVar("L", _Content, _TokenLogprobs)


class _Choice(msgspec.Struct, Generic[L]):
    index: int
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: L | None = None
    routed_experts: str | dict[str, Any] | None = None


class _Response(msgspec.Struct, Generic[L]):
    choices: list[_Choice[L]]


def samples_of(body: bytes, spec: RouterSpec, read_rows: Callable[..., Routes] = wire.from_vllm) -> list[Sample]:
    """Return the choices of a generate response. Raises EngineError if the body is not a valid response.

    `read_rows` is the reader of the rows: `wire.from_vllm`, or `wire.from_dynamo` for the same route of Dynamo.
    """
    response = decoded(body, _Response[_Content], f"the server's answer to {GENERATE}")
    samples = []
    for choice in response.choices:
        content = (choice.logprobs.content if choice.logprobs else None) or []
        samples.append(_sample(choice, [token.logprob for token in content], spec, read_rows))
    return samples


def samples_of_completions(body: bytes, spec: RouterSpec) -> list[Sample]:
    """Return the choices of a /v1/completions response. Raises EngineError if the body is not a valid response."""
    response = decoded(body, _Response[_TokenLogprobs], f"the server's answer to {COMPLETIONS}")
    samples = []
    for choice in response.choices:
        if choice.token_ids is None:
            raise EngineError(f"the server's answer to {COMPLETIONS} has no token_ids, which return_token_ids asks for")
        logprobs = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
        samples.append(_sample(choice, logprobs, spec, wire.from_vllm))
    return samples


def _sample(
    choice: _Choice[Any], logprobs: Sequence[float], spec: RouterSpec, read_rows: Callable[..., Routes]
) -> Sample:
    rows = None
    if choice.routed_experts is not None:
        rows = read_rows(choice.routed_experts, spec, allow_zero_layers=True)  # CaptureWatch counts them
    return Sample(choice.index, choice.token_ids or [], logprobs, rows, choice.finish_reason)


class TokenRoute(abc.ABC):
    """Describes one HTTP route for token ids."""

    path: str

    @abc.abstractmethod
    def body(self, flight: Flight, end_of_sequence: Sequence[int]) -> dict[str, Any]:
        """Return the JSON body of a request."""

    @abc.abstractmethod
    def samples(self, answer: bytes, request: Request, spec: RouterSpec) -> list[Sample]:
        """Return the samples in an answer, with the rows from the request's `start` on."""

    @abc.abstractmethod
    def server_name(self, name: str) -> str:
        """Return the server's own name of the request that we call `name`, for aborts."""


@dataclasses.dataclass(frozen=True)
class GenerateRoute(TokenRoute):
    """Describes /inference/v1/generate.

    `collects` says whether the server answers with all samples of a request. Up to vLLM 0.28 it answers with those that
    its last message brought, unless the request asks for one message at the end.
    """

    collects: bool

    path = GENERATE

    def body(self, flight: Flight, end_of_sequence: Sequence[int]) -> dict[str, Any]:
        """Return the JSON body of a request."""
        arguments = sampling_arguments(flight.request, end_of_sequence, as_text=True)
        if not self.collects:
            arguments["output_kind"] = FINAL_ONLY
        return {
            "request_id": flight.name,
            "token_ids": list(map(int, flight.request.token_ids)),
            "sampling_params": arguments,
            "cache_salt": flight.salt,
        }

    def samples(self, answer: bytes, request: Request, spec: RouterSpec) -> list[Sample]:
        """Return the samples in an answer."""
        return samples_of(answer, spec)

    def server_name(self, name: str) -> str:
        """Return the server's own name of the request that we call `name`."""
        return f"generate-tokens-{name}"


@dataclasses.dataclass(frozen=True)
class CompletionsRoute(TokenRoute):
    """Describes /v1/completions.

    `cuts_rows` says whether the server leaves rows before `start` out; otherwise they are cut here. `context` is the
    longest sequence of the server's model, if it is known.
    """

    cuts_rows: bool
    context: int | None

    path = COMPLETIONS

    def body(self, flight: Flight, end_of_sequence: Sequence[int]) -> dict[str, Any]:
        """Return the JSON body of a request."""
        request = flight.request
        arguments = completions_arguments(request, end_of_sequence, self.cuts_rows)
        if self.context is not None:  # this route refuses a longer sequence, where the other one ends it there
            room = self.context - len(request.token_ids)
            arguments["max_tokens"] = min(request.sampling.max_tokens, max(1, room))
        return {
            "request_id": flight.name,
            "prompt": list(map(int, request.token_ids)),
            "cache_salt": flight.salt,
            **arguments,
        }

    def samples(self, answer: bytes, request: Request, spec: RouterSpec) -> list[Sample]:
        """Return the samples in an answer. Raises EngineError if a limit of the server cut one of them."""
        samples = samples_of_completions(answer, spec)
        for sample in samples:
            self._refuse_server_limit(sample, request)
            if sample.rows is not None and not self.cuts_rows:
                sample.rows = _cut(sample.rows, request, len(sample.token_ids))
        return samples

    def _refuse_server_limit(self, sample: Sample, request: Request) -> None:
        """Raise EngineError if the server ended a sample before the request's max_tokens.

        The max_new_tokens of a generation config applies to every request of this route, whatever the request says.
        """
        prompt, sampled, asked = len(request.token_ids), len(sample.token_ids), request.sampling.max_tokens
        if sample.finish_reason == "length" and sampled < asked and prompt + sampled != self.context:
            raise EngineError(
                f"asked for up to {asked} tokens, and the server ended the sample at {sampled} without reaching its "
                "max_model_len: the max_new_tokens of its generation config limits it. Start it with "
                "--generation-config vllm"
            )

    def server_name(self, name: str) -> str:
        """Return the server's own name of the request that we call `name`."""
        return f"cmpl-{name}-0"


def _cut(rows: Routes, request: Request, sampled: int) -> Routes:
    """Return the rows from the request's start on. Raises EngineError if these are not the rows of all tokens."""
    whole = row_count(len(request.token_ids), sampled)
    if len(rows) != whole:
        raise EngineError(f"expected {whole} rows (prompt {len(request.token_ids)} + {sampled} - 1), got {len(rows)}")
    return rows[request.start :]
