"""An embedded engine on weights A, and a gate to act in the middle of its generation.

Where a test acts in the middle it does so behind an exact pass: a `Gate` holds the engine's thread there until the
command that is tested waits in line. The fixtures are not in conftest.py, whose `engine` is every engine: a test file
takes them by assigning them to names of its own, `one_core` too, which then counts for all its tests.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay.engines import Sampling
from router_replay.engines.embedded import EmbeddedEngine
from tests.engines.conftest import Checkpoints

SEEDED = Sampling(max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_a(checkpoints: Checkpoints) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoints.a)


@pytest.fixture
def engine(model_a: Any, checkpoints: Checkpoints) -> Iterator[EmbeddedEngine]:
    """Version 3 of weights A; the module's model is given back with A's weights."""
    kept = {name: tensor.clone() for name, tensor in model_a.state_dict().items()}
    with EmbeddedEngine(model_a, version=3) as engine:
        yield engine
    model_a.load_state_dict(kept)


class Gate:
    """Stops the engine behind pass number `passes` (0 is the next one) until `then` has put a command in line."""

    def __init__(self, engine: EmbeddedEngine, passes: int) -> None:
        self.engine, self.left = engine, passes
        self.reached, self.opened = threading.Event(), threading.Event()
        self.hook = engine._model.register_forward_hook(self._after)

    def _after(self, *_: Any) -> None:
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(20)
        self.left -= 1

    def then(self, *commands: Callable[[], Any]) -> list[concurrent.futures.Future[Any]]:
        assert self.reached.wait(20)
        futures = []
        for command in commands:
            waiting = len(self.engine._commands)
            futures.append(in_thread(command))
            while len(self.engine._commands) == waiting and not futures[-1].done():
                time.sleep(0.001)
        self.hook.remove()
        self.opened.set()
        return futures


def in_thread(command: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(command())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def landed(future: concurrent.futures.Future[Any]) -> Any:
    return future.result(timeout=20)
