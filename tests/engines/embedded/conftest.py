"""An embedded engine on weights A."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay.engines import EmbeddedEngine
from tests.engines.conftest import Checkpoints


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
