"""An agent's session of two turns in front of a real engine, with OpenAI's own client, for the tests of each engine."""

from __future__ import annotations

from typing import Any

from router_replay.engines import Engine
from router_replay.gateway import Gateway, GatewayServer, read_session
from tests.gateway.conftest import client_of, http, say

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def rows_fit_their_tokens(engine: Engine, folder: str, words: str, reply: str) -> int:
    """Say `words` and then `reply`, and score the session with its rows on the model of `folder`, in float32.

    Returns how many tokens were sampled. The second answer is a stream.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from router_replay import RouterReplay, logprobs, pack

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    with GatewayServer(Gateway(engine, tokenizer, max_length=256)) as server:
        agent = client_of(server, "two-turns")
        first = say(agent, words, max_tokens=12, temperature=1.0, logprobs=True)
        said = [words, first.choices[0].message.model_dump(), reply]
        chunks = list(say(agent, *said, max_tokens=12, temperature=1.0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        body = http("GET", f"{server.url}/sessions/two-turns")
    assert body["answers"] == 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    replayer, tokens = RouterReplay(model), 0
    for sample in read_session(body, engine.spec):
        assert sample.first_missing_loss_row() is None
        batch = pack([sample], len(sample))
        with torch.no_grad(), replayer.replay(batch):
            scored = logprobs(model, batch)[: len(sample) - 1].numpy()
        sampled = sample.loss_mask.nonzero()[0]
        assert abs(scored[sampled - 1] - sample.logprobs[sampled]).max() < 1e-3
        tokens += len(sampled)
    assert tokens
    return tokens
