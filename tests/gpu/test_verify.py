"""Test that `verify` judges rows on the device: those of an engine belong, and a fault is named."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from router_replay.batch import Sample
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.verify.rollouts import generate
from router_replay.verify.run import verify
from tests.gpu.conftest import VOCABULARY, make_model


@pytest.fixture(scope="module")
def samples(device: str) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 20).tolist() for _ in range(12)]
    with EmbeddedEngine(make_model(0, device), max_length=128) as engine:
        return generate(engine, prompts, 24)


def test_rows_of_an_engine_belong_to_their_tokens(
    samples: list[Sample], folders: list[pathlib.Path], device: str
) -> None:
    verdict = verify(samples, str(folders[0]), "embedded", device=device)
    assert verdict.finding is None
    assert verdict.live is not None
    assert verdict.replayed is not None
    assert verdict.replayed.k3 < verdict.live.k3
    assert verdict.split is not None
    assert min(verdict.split.number_types, verdict.split.equal_gates) > 0


@pytest.mark.parametrize("fault", ["shift", "layer-offset", "stale"])
def test_a_fault_is_named(samples: list[Sample], folders: list[pathlib.Path], device: str, fault: str) -> None:
    verdict = verify(samples, str(folders[0]), "embedded", device=device, fault=fault)
    assert verdict.finding is not None
    assert verdict.finding.fault == fault
