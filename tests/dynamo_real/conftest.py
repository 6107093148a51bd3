"""Real Dynamos on the CPU for `make test-dynamo`, and a list of what was verified on them.

Two of them, each with frontends that have and that lack the generate route:
- `dynamo`: one worker with our plugin and --enable-rl, started on checkpoint B;
- `plain`: two workers as a user has them who does not know of us: no plugin, no --enable-rl, on checkpoint A.

The checkpoints' generation_config.json has sampling defaults that no request of ours may get.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from router_replay.engines import Completion, DynamoEngine, Engine, Request
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec
from tests.dynamo_real.processes import Dynamo
from tests.engines.conftest import (
    GREEDY,
    OWN_WORKER,
    SHAPE,
    Checkpoints,
    Sampled,
    environment,
    one,
    prompt,
    save_model,
)
from tests.engines.conftest import trainer as trainer

SPEC = RouterSpec(16, 4, (1, 2, 3), num_layers=4)
HOSTILE = {"top_k": 1, "repetition_penalty": 1.7, "min_p": 0.9, "temperature": 0.2}
CAPTURING = "--enable-return-routed-experts"
_NO_GENERATE = "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1"
# What the engine refuses without the generate route, by the names of the contract's tests, and the reason it gives.
REFUSED = {
    "test_forcing_an_engines_own_rows_changes_nothing[completions": _NO_GENERATE,
    "test_forced_rows_of_another_come_back_and_change_the_answer[completions": _NO_GENERATE,
    "test_uncaptured_rows_and_rows_beyond_the_forced_are_routed_live[completions": _NO_GENERATE,
    "test_forced_and_free_requests_share_a_batch[completions": _NO_GENERATE,
    "test_what_cannot_be_is_refused_before_it_is_sent[completions-request_3": _NO_GENERATE,  # forced rows
    "test_what_cannot_be_is_refused_before_it_is_sent[completions-request_4": _NO_GENERATE,
    "test_generation_stops_at_the_end_of_sequence_and_at_stop_tokens[completions": "ignores the stop tokens",
}
_verified: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _verified:  # plain `make test` loads this file too
        terminalreporter.section("verified on a real Dynamo")
        for line in _verified:
            terminalreporter.write_line(f"  {line}")


@pytest.fixture
def verified() -> Callable[[str], None]:
    return _verified.append


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Expect a refusal with its reason from the tests in REFUSED, and an ordinary end from all others."""
    reasons = [reason for name, reason in REFUSED.items() if pyfuncitem.name.startswith(name)]
    if not reasons or "dynamo_real" not in str(pyfuncitem.path):
        return (yield)
    try:
        yield
    except (EngineError, AssertionError) as error:  # the latter from a pytest.raises that expects another reason
        if reasons[0] in str(error):
            return True
        raise
    raise AssertionError(f"this engine was to refuse: {reasons[0]}")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate("ab"):
        save_model(folder / name, seed)
        file = folder / name / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **HOSTILE, "do_sample": True}))
    return Checkpoints(str(folder / "a"), str(folder / "b"))


@pytest.fixture(scope="session")
def started(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dynamo, Dynamo]]:
    """Both Dynamos, starting at the same time."""
    whole, plain = (Dynamo(tmp_path_factory.mktemp(name)) for name in ("dynamo", "plain"))
    try:
        whole.start_worker(checkpoints.b, CAPTURING, "--enable-rl", ROUTER_REPLAY_VLLM="required")
        for _ in range(2):
            plain.start_worker(checkpoints.a, CAPTURING, ROUTER_REPLAY_VLLM="0")
        for dynamo in (whole, plain):
            dynamo.start_frontend("generate", generate=True)
            dynamo.start_frontend("completions", generate=False)
        plain.start_frontend("migrating", "--migration-limit", "3", generate=False)
        yield whole, plain
    finally:
        whole.stop()
        plain.stop()


@pytest.fixture(scope="session")
def dynamo(started: tuple[Dynamo, Dynamo]) -> Dynamo:
    started[0].wait()
    return started[0]


@pytest.fixture(scope="session")
def plain(started: tuple[Dynamo, Dynamo]) -> Dynamo:
    started[1].wait()
    return started[1]


def connect(dynamo: Dynamo, frontend: str, **more: Any) -> DynamoEngine:
    urls = [worker.url for worker in dynamo.workers]
    return DynamoEngine(dynamo.frontends[frontend].url, **{"workers": urls, "timeout": 120, **more})


@pytest.fixture(scope="session")
def in_process(started: tuple[Dynamo, Dynamo], checkpoints: Checkpoints) -> list[Completion]:
    """What vLLM in one process answers on checkpoint A to 16 greedy requests."""
    from router_replay.engines.vllm.inprocess import VllmEngine

    with environment(**OWN_WORKER), VllmEngine(checkpoints.a, **SHAPE) as engine:
        return [one(engine, Request(prompt(seed), GREEDY)) for seed in range(16)]


@pytest.fixture(scope="session")
def fresh_b(dynamo: Dynamo) -> Completion:
    """What the worker that was started on checkpoint B says, before any update."""
    with connect(dynamo, "generate") as engine:
        return one(engine, Request(prompt(), GREEDY))


@pytest.fixture(scope="session")
def engines(dynamo: Dynamo, fresh_b: Completion, checkpoints: Checkpoints) -> Iterator[dict[str, Engine]]:
    """One engine by each route, on the same worker, taken from B to A as soon as the reference is known."""
    with connect(dynamo, "generate") as generate, connect(dynamo, "completions") as completions:
        generate.update_weights(checkpoints.a, 0)
        yield {"generate": generate, "completions": completions}


@pytest.fixture(params=["generate", "completions"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine], checkpoints: Checkpoints) -> Iterator[Engine]:
    """Running on A as version 0; whatever a test leaves behind is cleared."""
    engine = engines[request.param]
    yield engine
    engine.abort()
    engine.resume()
    if engine.version != 0:
        engine.update_weights(checkpoints.a, 0)


@pytest.fixture
def sampled(dynamo: Dynamo) -> Sampled:
    """The worker's own counter of sampled tokens, so that no check has to guess how fast the machine is."""
    return dynamo.sampled


@pytest.fixture(scope="session")
def recorded() -> pathlib.Path:
    """The payloads that the tests of tests/engines/dynamo use."""
    return pathlib.Path(__file__).parents[1] / "engines" / "dynamo" / "payloads"
