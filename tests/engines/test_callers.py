"""What callers get wrong is refused by every HTTP engine before anything is sent, and by its name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.errors import EngineError
from tests.engines import test_hostile_servers
from tests.engines.stub import Reply, Stub
from tests.engines.test_hostile_servers import PROMPT, VOCABULARY, Kind

stub, kind, engine = test_hostile_servers.stub, test_hostile_servers.kind, test_hostile_servers.engine


@pytest.mark.parametrize(
    "request_",
    [
        Request((5.5, 6)),  # type: ignore[arg-type]
        Request((5, VOCABULARY)),
        Request((5, -1)),
        Request((5, 6), start=1.0),  # type: ignore[arg-type]
        Request((5, 6), Sampling(max_tokens="3")),  # type: ignore[arg-type]
        Request((5, 6), Sampling(n=10**9)),
        Request((5, 6), Sampling(temperature="hot")),  # type: ignore[arg-type]
        Request((5, 6), Sampling(top_p=float("nan"))),
        Request((5, 6), id={"x": 1}),  # type: ignore[arg-type]
        "text",
    ],
)
def test_a_bad_request_is_not_sent(engine: Engine, kind: Kind, stub: Stub, request_: Any) -> None:
    asked = len(stub.bodies(kind.generates_by))
    with pytest.raises(EngineError):
        engine.generate([request_])
    assert len(stub.bodies(kind.generates_by)) == asked
    assert len(engine.generate([Request(PROMPT, Sampling(max_tokens=3))])) == 1


def test_numbers_of_numpy_are_sent_as_numbers(engine: Engine, kind: Kind, stub: Stub) -> None:
    sampling = Sampling(max_tokens=np.int64(3), temperature=np.float32(1.0), n=np.uint8(1))  # type: ignore[arg-type]
    [completion] = engine.generate([Request(np.asarray(PROMPT, np.uint16), sampling)])  # type: ignore[arg-type]
    assert completion.token_ids.tolist() == [10, 11, 12]


def test_two_requests_of_one_id_are_not_in_flight_together(engine: Engine, kind: Kind, stub: Stub) -> None:
    """But a request whose caller gave up does not bar the next."""
    request = Request(PROMPT, Sampling(max_tokens=3), id="twin")
    stub.answers[kind.generates_by] = Reply(kind.answer(), seconds=10)

    async def work() -> list[Completion]:
        asked = len(stub.bodies(kind.generates_by))
        given_up = asyncio.create_task(engine.submit(request))
        while len(stub.bodies(kind.generates_by)) == asked:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="twin: another request with this id is in flight"):
            await engine.submit(request)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        stub.answers[kind.generates_by] = Reply(kind.answer())
        return await engine.submit(request)

    assert len(asyncio.run(work())) == 1


@pytest.mark.parametrize("version", [-1, 1.0, True, "1", None])
def test_versions_that_cannot_be_are_refused(engine: Engine, kind: Kind, stub: Stub, version: Any) -> None:
    asked = len(stub.asked)
    with pytest.raises(EngineError, match="a policy version must"):
        engine.update_weights("/weights", version)
    with pytest.raises(EngineError, match="a policy version must"):
        kind.connect(stub.url, version=version)
    assert len(stub.asked) == asked


def test_other_arguments_that_cannot_be_are_refused(engine: Engine, stub: Stub) -> None:
    asked = len(stub.asked)
    with pytest.raises(EngineError, match="in_flight must be one of"):
        engine.pause("drop")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="in_flight must be one of"):
        engine.update_weights("/weights", 1, "drop")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="weights must be the path of a Hugging Face folder"):
        engine.update_weights(None, 1)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="abort takes a list"):
        engine.abort("request-1")
    assert len(stub.asked) == asked
