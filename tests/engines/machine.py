"""A state machine of an engine: submit, abort, pause, update, resume in any order, over every engine that runs here.

Whatever the order, a request lands with an answer or an EngineError, an abort returns what `submit` returns, an update
leaves the version that it names, nobody hangs, and each token has the version of the weights that sampled it. Servers
are fake (fake_server.py), and hostile now and then; the embedded engine is real.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from router_replay.engines import Completion, EmbeddedEngine, Engine, Request, Sampling
from router_replay.errors import EngineError
from tests.engines.fake_server import CONNECT, FIRST_TOKEN, HOSTILE, FakeServer, fake_engine
from tests.engines.stub import eventually

SECONDS = 30.0  # against a hang; nothing takes long here
InFlight = Literal["abort", "keep", "wait"]
Future = concurrent.futures.Future


@functools.cache
def tiny_model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


class EngineMachine(RuleBasedStateMachine):
    kinds = ("embedded", *sorted(CONNECT))

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.server: FakeServer | None = None
        self.paused = False
        self.updates = 0
        self.futures: dict[str, Future[list[Completion]]] = {}
        self.jobs_of: dict[str, int] = {}  # request -> how many the server makes of it
        self.spoilt: set[str] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    @initialize(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        self.kind = data.draw(st.sampled_from(self.kinds))
        self.engine: Engine
        if self.kind == "embedded":
            torch.set_num_threads(1)
            self.engine = self.stack.enter_context(EmbeddedEngine(tiny_model(), max_batch=3))
        else:
            self.server, self.engine = self.stack.enter_context(fake_engine(self.kind))

    # -- what users do --------------------------------------------------------------------------

    @rule(n=st.integers(1, 2), tokens=st.integers(1, 6), start=st.integers(0, 2), spoil=st.sampled_from(["", *HOSTILE]))
    def submit(self, n: int, tokens: int, start: int, spoil: str) -> None:
        request = Request((3, 4, 5), Sampling(tokens, n=n, ignore_eos=True), start=start)
        if self.server is not None and spoil and not self.paused:
            self.server.spoil = HOSTILE[spoil]
            self.spoilt.add(request.id)
        before = len(self.server.jobs) if self.server else 0
        future = asyncio.run_coroutine_threadsafe(self.engine.submit(request), self.loop)
        self.futures[request.id] = future
        self.jobs_of[request.id] = 1 if self.kind == "vllm_http" else n
        if request.id in self.spoilt:
            assert isinstance(future.exception(SECONDS), EngineError)
            self.server.spoil = None  # type: ignore[union-attr]
        elif self.server is not None and not self.paused:
            asked = self.jobs_of[request.id]
            eventually(lambda: future.done() or len(self.server.jobs) >= before + asked)  # type: ignore[union-attr]
        else:  # what comes next must find it in the engine
            eventually(lambda: future.done() or request.id in self.known_to_the_engine())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = sorted(self.futures)
        names = data.draw(st.none() | st.lists(st.sampled_from([*known, "nobody"]), max_size=3, unique=True))
        aborted = self.engine.abort(names)
        chosen = set(known if names is None else names) & set(known)
        assert {completion.request_id for completion in aborted} <= chosen
        for completion in aborted:
            landed = self.futures[completion.request_id].result(SECONDS)
            assert any(completion is one for one in landed)
        for name in chosen:
            concurrent.futures.wait([self.futures[name]], SECONDS)
            assert self.futures[name].done()

    @precondition(lambda self: self.server is not None)
    @rule()
    def finish(self) -> None:
        assert self.server is not None
        running = self.in_flight() if not self.paused else []
        self.server.finish()
        self.landed(running)

    @rule(in_flight=st.sampled_from(["abort", "keep", "wait"]))
    def pause(self, in_flight: InFlight) -> None:
        if self.settles(in_flight, lambda: self.engine.pause(in_flight)):
            self.paused = True

    @rule()
    def resume(self) -> None:
        self.engine.resume()
        self.paused = False
        if self.server is not None:
            server = self.server
            assert not server.paused
            # Requests that waited in the client are on their way: what comes next must find them at the server.
            eventually(lambda: len(server.jobs) >= sum(self.jobs_of[name] for name in self.in_flight()))

    @rule(in_flight=st.sampled_from(["abort", "keep", "wait"]), refused=st.booleans())
    def update(self, in_flight: InFlight, refused: bool) -> None:
        version, before = self.updates + 1, self.engine.version
        source: Any = tiny_model().state_dict()
        if self.server is not None:
            source = f"/weights/{version}"
            # A worker of Dynamo that fails leaves workers of two versions, and the engine ends: not here.
            self.server.refuses_weights = refused and self.kind != "dynamo"
            if self.server.refuses_weights and (in_flight != "wait" or not self.paused):
                self.let_end(in_flight)
                try:
                    self.engine.update_weights(source, version, in_flight)
                    raise AssertionError("these weights were to be refused")
                except EngineError:
                    assert self.engine.version == before
                self.server.refuses_weights = False
                return
            self.server.refuses_weights = False
        if self.settles(in_flight, lambda: self.engine.update_weights(source, version, in_flight), loads=True):
            self.updates = version
            assert self.engine.version == version
        else:
            assert self.engine.version == before

    # -- what must hold -------------------------------------------------------------------------

    def known_to_the_engine(self) -> list[str]:
        engine: Any = self.engine
        flights = engine._flights if self.server is not None else engine._schedule._flights
        return [flight.request.id for flight in list(flights)]

    def in_flight(self) -> list[str]:
        return [name for name, future in self.futures.items() if not future.done()]

    def let_end(self, in_flight: InFlight) -> None:
        if self.server is not None and in_flight == "wait" and not self.paused:
            self.server.finish()

    def settles(self, in_flight: InFlight, act: Any, loads: bool = False) -> bool:
        """Call it, and see that what came before was settled as asked; False where it had to be refused."""
        before = self.in_flight()
        self.let_end(in_flight)
        refusal = ""
        try:
            act()
        except EngineError as error:
            refusal = str(error)
        if refusal:
            held = in_flight == "wait" and self.paused and "finishes no request" in refusal
            mixed = loads and self.kind == "dynamo" and in_flight == "keep" and "mix two policies" in refusal
            assert held or mixed, refusal
            assert before
            return False
        assert not (in_flight == "wait" and self.paused and self.in_flight())
        if in_flight != "keep":
            self.landed(before)
        return True

    def landed(self, names: list[str]) -> None:
        for name in names:
            if name not in self.spoilt:
                self.check(self.futures[name].result(SECONDS))

    def check(self, completions: list[Completion]) -> None:
        for index, completion in enumerate(completions):
            assert completion.index == index
            assert len(completion.versions) == len(completion.token_ids)
            assert (np.diff(completion.versions) >= 0).all()
            if self.server is not None:
                assert (completion.token_ids - FIRST_TOKEN).tolist() == completion.versions.tolist()
            if completion.finish_reason == "length":
                assert len(completion.token_ids)

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.engine.resume()
                if self.server is not None:
                    self.server.run_freely()
                self.landed(list(self.futures))
                self.engine.close()
                for call in (lambda: self.engine.generate([Request((3, 4))]), self.engine.abort, self.engine.pause):
                    try:
                        call()
                        raise AssertionError("a closed engine did something")
                    except EngineError:
                        pass
        finally:
            self.stack.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(SECONDS)
            self.loop.close()
