"""Real answers of each vLLM that was run, recorded by record.py, and what is read from them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from router_replay.engines.vllm.samples import Sample
from router_replay.engines.vllm.versions import refuse_version
from router_replay.spec import RouterSpec
from tests.engines.vllm.record import PAYLOADS, REQUEST, ROUTES, body_of, file_of, route_of

SPEC = RouterSpec(16, 4, (1, 2, 3), num_layers=4)
FILES = sorted(PAYLOADS.glob("*.json"))
VERSIONS = ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]


def recorded(file: pathlib.Path) -> tuple[dict[str, Any], list[Sample]]:
    told = json.loads(file.read_text())
    route = route_of(file.stem.rpartition("_")[2], told["version"])
    return told, route.samples(json.dumps(told["answer"]).encode(), REQUEST, SPEC)


def test_every_version_is_recorded_on_both_routes() -> None:
    assert [file.name for file in FILES] == sorted(f"vllm_{v}_{r}.json" for v in VERSIONS for r in ROUTES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_answer_is_read(file: pathlib.Path) -> None:
    told, samples = recorded(file)
    refuse_version(told["version"])
    # What this package sends today is what was sent when it was recorded.
    assert body_of(file.stem.rpartition("_")[2], told["version"]) == told["request"]
    assert [sample.index for sample in samples] == [0, 1]
    for sample in samples:
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) == len(sample.logprobs) == 3
        assert sample.rows is not None
        assert len(sample.rows) == 6 + 3 - 1 - 2
    assert list(samples[0].token_ids) != list(samples[1].token_ids)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_routes_answer_the_same(version: str) -> None:
    (_, generated), (_, completed) = (recorded(file_of(route, version)) for route in ROUTES)
    for a, b in zip(generated, completed, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
        assert np.abs(np.subtract(a.logprobs, b.logprobs)).max() < 1e-5  # another batch, other rounding
        assert a.rows is not None
        assert b.rows is not None
        assert np.array_equal(a.rows.ids, b.rows.ids)
