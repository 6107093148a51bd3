"""Runs a transformers model in this process, generating in batches with a key-value cache.

    with EmbeddedEngine("Qwen/Qwen3-30B-A3B", dtype="bfloat16", device_map="cuda") as engine:
        [completion] = engine.generate([Request((5, 6, 7), Sampling(max_tokens=8))])

Requests join and leave the batch between two passes. One thread owns the model and all state; every call of the
protocol becomes a command that this thread runs between two passes, so calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from router_replay.engines import checks
from router_replay.engines.base import Engine, check_in_flight
from router_replay.engines.embedded.cache import why_one_at_a_time
from router_replay.engines.embedded.runner import Runner
from router_replay.engines.embedded.samples import Flight
from router_replay.engines.embedded.schedule import Barrier, Schedule
from router_replay.engines.embedded.weights import Source, copy_in_place, refuse_folder, stage
from router_replay.engines.pass_order import PassOrder
from router_replay.engines.types import Capabilities, Completion, InFlight, Request
from router_replay.errors import EngineError
from router_replay.forward.inner import inner_model
from router_replay.forward.router_precision import compute_routers_in_float32
from router_replay.model_building import BUILDING
from router_replay.replay import RouterReplay

Future = concurrent.futures.Future
logger = logging.getLogger(__name__)


class EmbeddedEngine(Engine):
    """Generates with a given `model`, or with a Hugging Face folder that is loaded with `load_arguments`.

    Until `close`, the engine owns the model: it sets evaluation mode and controls its routes and weights. `version` is
    the policy version of the weights that the model has now. `max_batch` limits the samples that decode together,
    `max_prefill_tokens` the prompt tokens of one pass (a longer prompt gets a separate pass), and `max_length` the
    tokens of prompt plus completion (by default the model's own limit). `eos_token_id` is the token, or the tokens,
    that end a sequence (by default those of the model's config). `router_dtype="float32"` computes the routers' logits
    in float32, whatever the dtype of the model is.
    """

    def __init__(
        self,
        model: Any,
        *,
        version: int = 0,
        max_batch: int = 64,
        max_prefill_tokens: int = 16384,
        max_length: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        router_dtype: Literal["model", "float32"] = "model",
        **load_arguments: Any,
    ) -> None:
        max_batch = checks.integer(max_batch, "max_batch", 1, checks.TOKEN_LIMIT)
        max_prefill_tokens = checks.integer(max_prefill_tokens, "max_prefill_tokens", 1, checks.TOKEN_LIMIT)
        if max_length is not None:
            max_length = checks.integer(max_length, "max_length", 1, checks.TOKEN_LIMIT)
        version = checks.version(version)
        checks.router_dtype(router_dtype)
        folder = model if isinstance(model, str | os.PathLike) else None
        if folder is not None:
            with BUILDING:
                model = AutoModelForCausalLM.from_pretrained(os.fspath(folder), **load_arguments)
        elif load_arguments:
            raise EngineError(
                f"{', '.join(load_arguments)}: these arguments are for loading a folder, but the model is already "
                "loaded: leave them out, or pass the path of a folder"
            )
        inner = inner_model(model)  # without the wrappers of torch.compile, PEFT and others
        if inner.get_output_embeddings() is None or "decoder_input_ids" in signature(type(inner).forward).parameters:
            raise EngineError(
                f"{type(inner).__name__} cannot generate: expected a decoder-only model with a language-model head, "
                "as AutoModelForCausalLM loads it"
            )
        if router_dtype == "float32":
            compute_routers_in_float32(model)
            if folder is not None:  # loading has rounded the routers' weights to the model's dtype
                copy_in_place(inner, stage(inner, folder))
        why = why_one_at_a_time(inner.config)
        why = f"samples are generated one at a time: {why}" if why else ""
        text = inner.config.get_text_config(decoder=True)
        self._max_length: int = max_length or getattr(text, "max_position_embeddings", None) or 1 << 62
        self.vocabulary: int = inner.get_input_embeddings().weight.shape[0]
        self._end_of_sequence = _end_of_sequence(inner) if eos_token_id is None else _ids(eos_token_id)
        self._model = model.eval()
        self._replayer = RouterReplay(model)
        self.spec = self._replayer.spec
        self.capabilities = Capabilities(
            routes=True, forced_routes=True, start=True, versions=True, checked_weights=True, why_not=why
        )
        runner = Runner(model, self._replayer, one_at_a_time=bool(why))
        self._schedule = Schedule(runner, self.spec, version, 1 if why else max_batch, max_prefill_tokens)
        self._wake = threading.Condition()
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closing = False
        self._end = "this engine was closed: create a new one"
        self._thread = threading.Thread(target=self._run, name="router-replay-embedded", daemon=True)
        self._thread.start()

    # -- the protocol ---------------------------------------------------------------------------

    @property
    def version(self) -> int:  # type: ignore[override]
        """The policy version of the weights that the next pass uses."""
        return self._schedule.version

    async def submit(self, request: Request) -> list[Completion]:
        """Generate all samples of one `request`. A cancelled call frees its place in the batch."""
        flight = Flight(self._checked(request), self._end_of_sequence, self._max_length)
        joined = self._post(lambda: self._schedule.join(flight))
        try:
            await asyncio.wrap_future(joined)
            return await asyncio.wrap_future(flight.future)
        except asyncio.CancelledError:
            self._give_up([flight])
            raise

    def generate_each(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """Generate and return one list of samples for each of the `requests`.

        The requests join the batch together. Which requests share a pass, and so every bit of the result, depends only
        on the requests and not on thread timing.
        """
        checked = self._checked_batch(requests)
        flights = [Flight(request, self._end_of_sequence, self._max_length) for request in checked]
        joined = self._post(lambda: self._schedule.join(*flights))
        try:
            joined.result()
            futures = [flight.future for flight in flights]
            for future in concurrent.futures.wait(futures, return_when="FIRST_EXCEPTION").done:
                future.result()
        except BaseException:
            self._give_up(flights)
            raise
        return [future.result() for future in futures]

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort the requests `request_ids` (all if None) after the current pass, and return their output so far."""
        wanted = checks.request_ids(request_ids)
        return self._post(lambda: self._schedule.abort(wanted)).result()

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Run no more passes after settling running requests by `in_flight`."""
        self._when_settled(in_flight, lambda: self._set_paused(True))

    def resume(self) -> None:
        """Run passes again."""
        self._when_settled("keep", lambda: self._set_paused(False))

    def update_weights(self, source: Source, version: int, in_flight: InFlight = "abort") -> None:
        """Load the weights of a folder, a state dict or a module in place as `version`. Generation stops meanwhile.

        Raises EngineError for a `source` that does not fit, before any request is affected. `in_flight` says what
        happens to running requests. Kept requests continue with their key-value cache of the old weights; the versions
        of their tokens and rows record this.
        """
        refuse_folder(source)
        version = checks.version(version)
        staged: list[Mapping[str, Any]] = []

        def prepare() -> None:
            staged.append(stage(inner_model(self._model), source))
            self._schedule.order.swaps(version)  # before requests end because of it

        self._when_settled(in_flight, act=lambda: self._swap(staged[-1], version), prepare=prepare)

    def obey(self, order: PassOrder) -> Callable[[], None]:
        """Let `order` watch, or decide, which requests share each pass from now on.

        Returns a function that makes the engine ask `order` again; call it when `order` allows another pass.
        """
        self._post(lambda: setattr(self._schedule, "order", order)).result()
        return self._look_again

    def ping(self) -> None:
        """Raise EngineError if the thread of the engine has ended, or if its weights are unknown."""
        if self._schedule.broken:
            raise EngineError(self._schedule.broken)
        self._post(lambda: None).result()

    def close(self) -> None:
        """Stop the engine's thread and give the model back. Requests in flight fail with EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # -- from any thread ------------------------------------------------------------------------

    def _checked(self, request: Request) -> Request:
        request = super()._checked(request)
        tokens = len(request.token_ids)
        if tokens >= self._max_length:
            raise EngineError(
                f"{request.id}: the prompt has {tokens} tokens, expected at most {self._max_length - 1}: prompt and "
                f"completion together have a limit of {self._max_length} tokens (max_length)"
            )
        return request

    def _give_up(self, flights: Sequence[Flight]) -> None:
        """Free the places of requests whose callers no longer wait."""
        for flight in flights:
            flight.future.cancel()
        self._look_again()

    def _look_again(self) -> None:
        with self._wake:
            self._wake.notify()

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            if self._closing:
                raise EngineError(self._end)
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def _when_settled(
        self, in_flight: InFlight, act: Callable[[], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        barrier = Barrier(check_in_flight(in_flight), prepare, act, Future())
        self._post(lambda: self._schedule.add(barrier)).result()
        barrier.future.result()

    # -- on the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._next_commands():
                    self._schedule.pass_barriers()
                    self._schedule.advance()
        except BaseException as error:
            self._end = f"the engine's thread died: {type(error).__name__}: {error}. Create a new engine"
            logger.exception("the thread of the embedded engine died; all waiting calls raise EngineError")
        finally:
            self._shut_down()

    def _next_commands(self) -> bool:
        """Run the commands that arrived during the last pass, or wait for one if idle. Returns False to end."""
        with self._wake:
            while not (self._commands or self._closing or self._schedule.has_work()):
                self._wake.wait()
                self._schedule.land()  # a wake-up without a command is a cancelled submit
            if self._closing:
                return False
            commands, self._commands = self._commands, []
        for command, future in commands:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:  # any error is passed to the caller
                    future.set_exception(error)
        return True

    def _set_paused(self, paused: bool) -> None:
        self._schedule.paused = paused

    def _swap(self, tensors: Mapping[str, Any], version: int) -> None:
        try:
            copy_in_place(inner_model(self._model), tensors)
        except Exception as error:
            broken = (
                f"copying the weights of version {version} failed partway, so the model's weights are unknown: {error}"
                ". Create a new engine"
            )
            self._schedule.broken = broken
            self._schedule.fail_all(broken)
            raise EngineError(broken) from error
        self._schedule.version = version

    def _shut_down(self) -> None:
        with self._wake:
            self._closing = True
            left = [future for _, future in self._commands]
        for future in left:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # its caller has cancelled it
                future.set_exception(EngineError(self._end))
        try:
            self._schedule.end(self._end)
        finally:
            self._replayer.detach()


def _end_of_sequence(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return _ids(tokens)
    return frozenset()


def _ids(tokens: int | Sequence[int]) -> frozenset[int]:
    return frozenset(checks.tokens([tokens] if isinstance(tokens, int) else tokens, "eos_token_id"))
