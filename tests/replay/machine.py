"""What is in force, as a state machine: opens, closes, passes, backwards, failures, threads, generators, detaches.

The machine does the same to a RouterReplay and to a plain list of open blocks. Outputs, gradients, recordings and
counters must be, to the bit, what that list says; what the list forbids must raise. The expected values come from
a twin of the model that has no checkpointing, and whose blocks are opened and closed around one pass each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from router_replay import Routes
from router_replay.errors import ReplayError
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny

LIVE = None
SEEDS = st.sampled_from([1, 2, 3])
MAIN = 0
ACTORS = st.sampled_from([MAIN, 1, 2])  # the test itself, and two generators
CHECKPOINTS = st.sampled_from(["off", "hf", "hf reentrant", "own", "own reentrant"])
Command = Callable[[], Any]


class Twin:
    """What a pass must give: its output, its gradients and its rows, live or under the routes of a seed."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.tiny = tiny.make("qwen3_moe")
        self.replayer = RouterReplay(self.tiny.model)
        self._known: dict[int | None, tuple[Tensor, list[Tensor], Routes]] = {}

    def routes(self, seed: int) -> Routes:
        return random_routes(self.tiny.tokens, self.replayer.spec, seed)

    def expected(self, seed: int | None) -> tuple[Tensor, list[Tensor], Routes]:
        if seed not in self._known:
            block: Any = contextlib.nullcontext() if seed is LIVE else self.replayer.replay(self.routes(seed))
            with self.replayer.record() as recorded, block:
                out = self.tiny.forward()
            gradients = gradients_of(self.tiny.model, out.square().sum())
            self._known[seed] = (out.detach(), gradients, recorded.routes)
        return self._known[seed]


def gradients_of(model: Any, loss: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@functools.cache
def twin() -> Twin:
    return Twin()


@dataclasses.dataclass(eq=False)
class Open:
    """A block that is open: whose it is, its routes, or what it must have recorded so far."""

    manager: Any
    actor: int
    seed: int | None = None
    recorded: Any = None
    rows: list[Routes] = dataclasses.field(default_factory=list)


def actor_loop() -> Generator[Any, Command, None]:
    """A generator that runs what it is sent, inside itself."""
    answer: Any = None
    while True:
        command = yield answer
        try:
            answer = command()
        except Exception as error:
            answer = error


class ReplayMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = tiny.make("qwen3_moe")
        self.plain_forwards = [layer.forward for layer in self.layers]
        self.replayer = RouterReplay(self.model.model)
        self.blocks: list[Open] = []
        self.losses: list[tuple[Tensor, int | None, bool]] = []  # loss, seed, checkpointed
        self.replayed_passes = 0
        self.way = "off"
        self.actors = {1: actor_loop(), 2: actor_loop()}
        for actor in self.actors.values():
            next(actor)

    @property
    def layers(self) -> Any:
        return self.model.model.model.layers

    # -- the plain model of it ----------------------------------------------------------------------

    @property
    def in_force(self) -> int | None:
        return next((block.seed for block in reversed(self.blocks) if block.seed is not None), LIVE)

    def may_act(self, actor: int) -> bool:
        """Only the opener of the innermost block, what it runs, and what runs it may use the model."""
        return not self.blocks or MAIN in (self.blocks[-1].actor, actor) or self.blocks[-1].actor == actor

    def act(self, actor: int, command: Command) -> Any:
        """The answer of `command` as this actor runs it; an error is an answer too."""
        if actor != MAIN:
            return self.actors[actor].send(command)
        try:
            return command()
        except Exception as error:
            return error

    def noted(self, seed: int | None) -> None:
        """A pass went through: every open recording has its rows."""
        for block in self.blocks:
            if block.recorded is not None:
                block.rows.append(twin().expected(seed)[2])
        self.replayed_passes += seed is not LIVE

    # -- blocks -------------------------------------------------------------------------------------

    @rule(actor=ACTORS, seed=SEEDS)
    def open_replay(self, actor: int, seed: int) -> None:
        self.open(Open(self.replayer.replay(twin().routes(seed)), actor, seed=seed))

    @rule(actor=ACTORS)
    def open_record(self, actor: int) -> None:
        self.open(Open(self.replayer.record(), actor))

    def open(self, block: Open) -> None:
        answer = self.act(block.actor, block.manager.__enter__)
        if not self.may_act(block.actor):
            assert isinstance(answer, ReplayError), answer
            return
        assert not isinstance(answer, Exception), answer
        block.recorded = answer if block.seed is None else None
        self.blocks.append(block)

    @precondition(lambda self: self.blocks)
    @rule()
    def close_innermost(self) -> None:
        self.close(self.blocks[-1])

    @precondition(lambda self: len(self.blocks) > 1)
    @rule(data=st.data())
    def close_in_the_wrong_order(self, data: st.DataObject) -> None:
        self.close(self.blocks[data.draw(st.integers(0, len(self.blocks) - 2))])

    def close(self, block: Open) -> None:
        innermost = self.blocks[-1] is block
        self.blocks.remove(block)
        answer = self.act(block.actor, lambda: block.manager.__exit__(None, None, None))
        assert isinstance(answer, ReplayError) != innermost, answer
        if block.recorded is not None and block.rows:
            assert block.recorded.routes == Routes.concat(block.rows)

    # -- passes -------------------------------------------------------------------------------------

    @rule(actor=ACTORS, keep=st.booleans())
    def forward(self, actor: int, keep: bool) -> None:
        answer = self.act(actor, self.model.forward)
        if not self.may_act(actor):
            assert isinstance(answer, ReplayError), answer
            return
        seed = self.in_force
        assert isinstance(answer, Tensor), answer
        assert torch.equal(answer, twin().expected(seed)[0])
        self.noted(seed)
        if keep and len(self.losses) < 4:
            self.losses.append((answer.square().sum(), seed, self.way != "off"))

    @rule(layer=st.integers(0, 2))
    def forward_that_fails(self, layer: int) -> None:
        handle = self.layers[layer].register_forward_pre_hook(lambda *_: 1 / 0)
        answer = self.act(MAIN, self.model.forward)
        handle.remove()
        assert isinstance(answer, ZeroDivisionError), answer

    @rule()
    def forward_in_a_thread(self) -> None:
        answer = in_a_thread(self.model.forward)
        if self.blocks:
            assert isinstance(answer, ReplayError), answer
        else:
            assert torch.equal(answer, twin().expected(LIVE)[0])

    @precondition(lambda self: self.losses)
    @rule(data=st.data(), threaded=st.booleans())
    def backward(self, data: st.DataObject, threaded: bool) -> None:
        loss, seed, _ = self.losses.pop(data.draw(st.integers(0, len(self.losses) - 1)))
        work = functools.partial(gradients_of, self.model.model, loss)
        found = in_a_thread(work) if threaded else work()
        assert not isinstance(found, Exception), found
        for mine, expected in zip(found, twin().expected(seed)[1], strict=True):
            assert torch.equal(mine, expected), seed

    @precondition(lambda self: not self.losses)  # what a graph was built with must be there for its recompute
    @rule(way=CHECKPOINTS)
    def checkpoint_by(self, way: str) -> None:
        self.way = way
        for layer, plain in zip(self.layers, self.plain_forwards, strict=True):
            layer.forward = plain
        self.model.model.gradient_checkpointing_disable()
        reentrant = way.endswith("reentrant")
        if way.startswith("hf"):
            self.model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        elif way.startswith("own"):
            for layer, plain in zip(self.layers, self.plain_forwards, strict=True):
                layer.forward = functools.partial(own_checkpoint, plain, reentrant)

    # -- copies and detaching -----------------------------------------------------------------------

    @precondition(lambda self: not self.way.startswith("own") and not self.losses)
    @rule()
    def a_deepcopy_is_live(self) -> None:
        other = tiny.Tiny("copy", copy.deepcopy(self.model.model), self.model.inputs, self.model.tokens)
        assert torch.equal(other.forward(), twin().expected(LIVE)[0])

    @rule()
    def detach_and_attach(self) -> None:
        outstanding = any(seed is not LIVE and checkpointed for _, seed, checkpointed in self.losses)
        gc.collect()  # graphs of backwards that are done
        answer = self.act(MAIN, self.replayer.detach)
        if self.blocks or outstanding:
            assert isinstance(answer, ReplayError), answer
            return
        assert answer is None, answer
        detached = self.act(MAIN, self.replayer.record().__enter__)
        assert isinstance(detached, ReplayError), detached
        self.losses.clear()  # live graphs of a replayer that is gone
        self.replayer, self.replayed_passes = RouterReplay(self.model.model), 0

    @invariant()
    def the_counters_are_right(self) -> None:
        stats = self.replayer.stats
        assert stats.passes == self.replayed_passes
        assert set(stats.rows_replayed) == {self.replayed_passes * self.model.tokens}

    def teardown(self) -> None:
        while self.blocks:
            self.close(self.blocks[-1])
        assert torch.equal(self.model.forward(), twin().expected(LIVE)[0])


def own_checkpoint(plain: Any, reentrant: bool, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
    return checkpoint(functools.partial(plain, *args, **kwargs), hidden, use_reentrant=reentrant)


def in_a_thread(work: Command) -> Any:
    answers: list[Any] = []

    def run() -> None:
        torch.set_num_threads(1)  # of this thread: sums in another order would differ in their last bits
        try:
            answers.append(work())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]
