"""Models that are loaded in two threads at once are loaded one after the other: transformers cannot do it otherwise."""

from __future__ import annotations

import concurrent.futures
import pathlib
import threading
import time
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from router_replay.engines import EmbeddedEngine
from router_replay.rl.config import ModelConfig, tiny_folder
from router_replay.rl.policy.models import read_model


def engine_of(folder: pathlib.Path) -> None:
    EmbeddedEngine(str(folder)).close()


def policy_of(folder: pathlib.Path) -> None:
    read_model(folder, ModelConfig())


@pytest.mark.parametrize("second", [engine_of, policy_of])
def test_two_threads_do_not_load_at_once(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load, inside, most = AutoModelForCausalLM.from_pretrained, threading.Semaphore(2), 0

    def slow(*given: Any, **more: Any) -> Any:
        nonlocal most
        with inside:
            most = max(most, 2 - inside._value)
            time.sleep(0.2)  # so that the other thread comes meanwhile
            return load(*given, **more)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for work in (threads.submit(engine_of, tiny_folder()), threads.submit(second, tiny_folder())):
            work.result()
    assert most == 1
