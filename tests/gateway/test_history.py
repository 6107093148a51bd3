"""Sampled tokens stay as they were sampled; a history that says something else gets a trajectory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from router_replay.engines import Engine, Request, Sampling
from router_replay.gateway import GatewayServer, read_session
from tests.gateway.conftest import http, say
from tests.gateway.talker import ADD, make_tokenizer

Client = Callable[..., Any]
TOKENIZER = make_tokenizer()


def session(server: GatewayServer, name: str) -> dict[str, Any]:
    return http("GET", f"{server.url}/sessions/{name}")


def replied(answer: Any) -> dict[str, Any]:
    """The assistant message, as an agent sends it back."""
    return answer.choices[0].message.model_dump()


def test_turns_become_one_trajectory_with_every_row(server: GatewayServer, client: Client, engine: Engine) -> None:
    agent = client("turns")
    first = say(agent, "hello")
    assert first.choices[0].message.content == "Hi"
    assert first.choices[0].finish_reason == "stop"
    second = say(agent, "hello", replied(first), "count")
    assert second.choices[0].message.content == "1 2 3 4 5 6"
    body = session(server, "turns")
    assert (body["answers"], body["started"], body["extended"], body["branched"]) == (2, 1, 1, 0)
    [sample] = read_session(body, engine.spec)
    assert sample.routes is not None
    assert sample.routes.captured.tolist() == [True] * (len(sample) - 1) + [False]
    assert sample.first_missing_loss_row() is None
    written = TOKENIZER.decode(sample.token_ids[sample.loss_mask].tolist())
    assert written == "Hi<|im_end|>1 2 3 4 5 6<|im_end|>"
    assert TOKENIZER.decode(sample.token_ids.tolist()) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n1 2 3 4 5 6<|im_end|>"
    )
    # The rows are those of this sequence: the engine gives the same ones when it reads all of it at once.
    whole = Request(sample.token_ids.tolist(), Sampling(max_tokens=1, temperature=0))
    [again] = engine.generate([whole])
    rows = len(sample) - 1
    assert sample.routes[:rows].same_sets(again.routes[:rows])


def test_tokens_that_no_tokenizer_writes_are_kept(server: GatewayServer, client: Client) -> None:
    agent = client("drift")
    first = say(agent, "drift")
    say(agent, "drift", replied(first), "hello")
    [sample] = read_session(session(server, "drift"))
    sampled = sample.token_ids[sample.loss_mask].tolist()
    assert sampled[:3] == [TOKENIZER.convert_tokens_to_ids(letter) for letter in "abc"]
    assert TOKENIZER.encode("abc") != sampled[:3]  # this is what tokenising the history again would give
    assert session(server, "drift")["extended"] == 1


def test_a_call_that_is_spaced_otherwise_is_the_same_history(server: GatewayServer, client: Client) -> None:
    agent = client("tight")
    first = say(agent, "tight", tools=[ADD])
    call = first.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    second = say(agent, "tight", replied(first), result, tools=[ADD])
    assert second.choices[0].message.content == "It is 3"
    body = session(server, "tight")
    assert (body["started"], body["extended"], body["branched"]) == (1, 1, 0)
    [sample] = read_session(body)
    assert '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call><|im_end|>\n' in TOKENIZER.decode(
        sample.token_ids.tolist()
    )


def test_an_edited_answer_branches_and_loses_nothing(server: GatewayServer, client: Client, engine: Engine) -> None:
    agent = client("edit")
    first = say(agent, "hello")
    say(agent, "hello", {"role": "assistant", "content": "Ho"}, "count")
    body = session(server, "edit")
    assert (body["started"], body["extended"], body["branched"]) == (1, 0, 1)
    one, other = read_session(body, engine.spec)
    assert TOKENIZER.decode(one.token_ids[one.loss_mask].tolist()) == "Hi<|im_end|>"
    assert TOKENIZER.decode(other.token_ids[other.loss_mask].tolist()) == "1 2 3 4 5 6<|im_end|>"
    assert "assistant\nHo<|im_end|>" in TOKENIZER.decode(other.token_ids.tolist())
    assert other.routes is not None
    [again] = engine.generate([Request(other.token_ids.tolist(), Sampling(max_tokens=1))])
    assert other.routes[: len(other) - 1].same_sets(again.routes[: len(other) - 1])
    say(agent, "hello", replied(first), "count")  # the first trajectory can still go on
    assert session(server, "edit")["extended"] == 1


def test_a_template_that_forgets_thoughts_branches(server: GatewayServer, client: Client) -> None:
    agent = client("thoughts")
    first = say(agent, "think")
    assert first.choices[0].message.content == "<think>hm</think>yes"
    say(agent, "think", replied(first), "hello")
    body = session(server, "thoughts")
    assert (body["started"], body["branched"]) == (1, 1)
    _, other = read_session(body)
    assert "think>" not in TOKENIZER.decode(other.token_ids.tolist()).replace("user\nthink", "")


def test_samples_of_one_prompt_have_trajectories_and_each_goes_on(server: GatewayServer, client: Client) -> None:
    agent = client("samples")
    answer = say(agent, "anything", n=3, temperature=1.0, seed=7, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    contents = [choice.message.content for choice in answer.choices]
    assert len(set(contents)) > 1
    last = answer.choices[2].message.model_dump()
    say(agent, "anything", last, "hello")
    body = session(server, "samples")
    assert (body["answers"], body["started"], body["branched"], body["extended"]) == (4, 1, 2, 1)
    assert len(body["trajectories"]) == 3
    assert len(body["trajectories"][2]["token_ids"]) > len(body["trajectories"][1]["token_ids"])


def test_a_stop_text_cuts_the_trajectory_too(server: GatewayServer, client: Client) -> None:
    answer = say(client("stop"), "count", stop=["3 4", "nothing"])
    assert answer.choices[0].message.content == "1 2 "
    assert answer.choices[0].finish_reason == "stop"
    [sample] = read_session(session(server, "stop"))
    assert TOKENIZER.decode(sample.token_ids[sample.loss_mask].tolist()) == "1 2 3 4"
    assert answer.usage.completion_tokens == 7


def test_a_text_that_goes_on_keeps_its_tokens(server: GatewayServer, client: Client) -> None:
    agent = client("text")
    prompt = "<|im_start|>user\ndrift<|im_end|>\n<|im_start|>assistant\n"
    first = agent.completions.create(model="any", prompt=prompt, temperature=0, max_tokens=3, logprobs=0)
    assert first.choices[0].text == "abc"
    assert len(first.choices[0].logprobs.token_logprobs) == 3
    agent.completions.create(model="any", prompt=prompt + "abc and", temperature=0, max_tokens=2)
    body = session(server, "text")
    assert (body["started"], body["extended"]) == (1, 1)
    [sample] = read_session(body)
    start = len(TOKENIZER.encode(prompt))
    assert sample.token_ids[start : start + 3].tolist() == [TOKENIZER.convert_tokens_to_ids(one) for one in "abc"]
    assert np.isfinite(sample.logprobs).all()
