"""The gateway in front of a real vLLM server, with OpenAI's own client: the rows of a session fit its tokens."""

from __future__ import annotations

from typing import Any

from router_replay.engines import Engine
from router_replay.gateway import Gateway, GatewayServer, read_session
from router_replay.gateway.served import served_folder
from tests.engines.conftest import KEY, Checkpoints, Servers
from tests.gateway.conftest import client_of, http, say


def test_a_session_of_two_turns_has_the_rows_that_the_trainer_needs(
    vllm_http_engine: Engine, checkpoints: Checkpoints
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from router_replay import RouterReplay, logprobs, pack

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoints.a)
    gateway = Gateway(vllm_http_engine, tokenizer, max_length=256)
    with GatewayServer(gateway) as server:
        agent = client_of(server, "vllm")
        words = " ".join(f"t{number}" for number in range(40, 80))
        first = say(agent, words, max_tokens=12, temperature=1.0, logprobs=True)
        said = [words, first.choices[0].message.model_dump(), "t9 t8"]
        chunks = list(say(agent, *said, max_tokens=12, temperature=1.0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        body = http("GET", f"{server.url}/sessions/vllm")
    assert body["answers"] == 2
    model = AutoModelForCausalLM.from_pretrained(checkpoints.a, dtype=torch.float32).eval()
    replayer = RouterReplay(model)
    for sample in read_session(body, vllm_http_engine.spec):
        assert sample.first_missing_loss_row() is None
        batch = pack([sample], len(sample))
        with torch.no_grad(), replayer.replay(batch):
            scored = logprobs(model, batch)[: len(sample) - 1].numpy()
        sampled = sample.loss_mask.nonzero()[0]
        assert abs(scored[sampled - 1] - sample.logprobs[sampled]).max() < 1e-3


def test_the_server_names_its_model(servers: Servers, vllm_http_engine: Engine, checkpoints: Checkpoints) -> None:
    assert served_folder(servers.ours.url, "vllm", KEY) == checkpoints.b
