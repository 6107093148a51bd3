"""The gateway in front of a real vLLM server: the rows of a session fit its tokens."""

from __future__ import annotations

from router_replay.engines import Engine
from router_replay.gateway.served import served_folder
from tests.engines.conftest import KEY, Checkpoints, Servers
from tests.gateway.two_turns import rows_fit_their_tokens


def test_a_session_of_two_turns_has_the_rows_that_the_trainer_needs(
    vllm_http_engine: Engine, checkpoints: Checkpoints
) -> None:
    words = " ".join(f"t{number}" for number in range(40, 80))
    rows_fit_their_tokens(vllm_http_engine, checkpoints.a, words, "t9 t8")


def test_the_server_names_its_model(servers: Servers, vllm_http_engine: Engine, checkpoints: Checkpoints) -> None:
    assert served_folder(servers.ours.url, "vllm", KEY) == checkpoints.b
