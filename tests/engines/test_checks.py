"""What a Request, a Sampling and a Completion may hold: every field is checked, and comes out as a plain value."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from router_replay.engines import Capabilities, Completion, Request, Sampling, checks
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1))
CAN = Capabilities(routes=True, forced_routes=True, start=True, versions=True)
NAN, INFINITE = float("nan"), float("inf")


def checked(request: Request) -> Request:
    return request.check(SPEC, CAN, vocabulary=100)


@pytest.mark.parametrize(
    "token_ids",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        np.asarray([5, 6], np.uint64),
        np.asarray([5, 6], np.int8),
        [np.int32(5), np.uint64(6)],
        torch.tensor([5, 6]),
        [torch.tensor(5), 6],
    ],
)
def test_integers_of_any_type_become_plain_ones(token_ids: Any) -> None:
    sampling = Sampling(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_p=1,
        seed=np.uint64(7),  # type: ignore[arg-type]
        stop_token_ids=np.asarray([1]),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        n=np.int16(2),  # type: ignore[arg-type]
    )
    request = checked(Request(token_ids, sampling, start=np.int64(1), id="mine"))  # type: ignore[arg-type]
    assert request.token_ids == (5, 6)
    assert request.sampling == Sampling(3, 0.5, 1.0, 7, (1,), True, 2)
    assert (request.start, request.id) == (1, "mine")
    json.dumps([request.token_ids, dataclasses.astuple(request.sampling), request.start])


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "the prompt is empty"),
        ([5, 6.0], r"the prompt\[1\] must be an integer, got 6.0 \(float\)"),
        ([5, 6.7], "must be an integer"),
        ([5, True], "must be an integer"),
        ([5, "6"], "must be an integer"),
        ([5, None], "must be an integer"),
        ([[5, 6]], "must be an integer"),
        ("56", "must be a sequence of token ids"),
        (b"56", "must be a sequence of token ids"),
        (5, "must be a sequence of token ids"),
        (None, "must be a sequence of token ids"),
        ({5: 6}, "must be a sequence of token ids"),
        (np.asarray([5.0, 6.0]), "must be an integer"),
        (np.asarray([True, False]), "must be an integer"),
        (np.asarray([[5, 6]]), "must be an integer"),
        (np.asarray(5), "must be a sequence of token ids"),
        (torch.tensor([5.0]), "must be an integer"),
        (torch.tensor([True]), "must be an integer"),
        ([5, -1], r"token ids must lie in \[0, 100\), got -1 at position 1"),
        ([5, 100], r"token ids must lie in \[0, 100\), got 100 at position 1"),
        ([5, 1 << 70], r"token ids must lie in"),
        ([np.uint64((1 << 64) - 1)], "must lie in"),
    ],
)
def test_prompts_that_are_none(token_ids: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        checked(Request(token_ids, id="mine"))
    assert str(caught.value).startswith("mine: ")


def test_where_the_vocabulary_is_not_known_absurd_tokens_are_refused_all_the_same() -> None:
    assert Request([1 << 30]).check(SPEC, CAN).token_ids == (1 << 30,)
    for token in (-1, 1 << 31):
        with pytest.raises(EngineError, match="token ids must lie in"):
            Request([token]).check(SPEC, CAN)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.0, True, "8", None, 1 << 31, NAN]),
        ("n", [0, -1, 1.0, True, "2", None, 1 << 20, 10**30]),
        ("seed", [-1, 1.0, True, "2", 1 << 63, NAN]),
        ("temperature", [-0.1, NAN, INFINITE, "1", None, True, 1j, [1.0]]),
        ("top_p", [0, -0.1, 1.1, NAN, INFINITE, "1", None, True]),
        ("stop_token_ids", [5, "5", None, (1.0,), (True,), (-1,), (100,), ("x",)]),
        ("ignore_eos", [0, 1, None, "no"]),
    ],
)
def test_sampling_that_cannot_be(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(EngineError, match=f"mine: .*{field}"):
            checked(Request([5], Sampling(**{field: value}), id="mine"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": 1.0}, "start must be an integer, got 1.0"),
        ({"start": True}, "start must be an integer"),
        ({"start": "1"}, "start must be an integer"),
        ({"start": -1}, r"start must lie in \[0, 1\]"),
        ({"start": 2}, r"start must lie in \[0, 1\]"),
        ({"sampling": None}, "sampling must be a Sampling"),
        ({"sampling": {"n": 1}}, "sampling must be a Sampling"),
        ({"forced_routes": np.zeros((2, 2, 4))}, "forced_routes must be Routes"),
        ({"forced_routes": random_routes(3, SPEC)}, "3 forced rows"),
        ({"id": ""}, "a request id must be a non-empty string"),
        ({"id": 5}, "a request id must be a non-empty string"),
        ({"id": ["x"]}, "a request id must be a non-empty string"),
        ({"id": None}, "a request id must be a non-empty string"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        checked(dataclasses.replace(Request([5, 6]), **changes))


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, np.float32(1), 1 << 63, np.bool_(True)])
def test_versions_that_cannot_be(value: Any) -> None:
    with pytest.raises(EngineError, match="a policy version must"):
        checks.version(value)


@pytest.mark.parametrize("value", [0, np.uint64(3), np.int8(3), (1 << 63) - 1])
def test_versions_are_integers_of_any_type(value: Any) -> None:
    assert checks.version(value) == int(value)
    assert type(checks.version(value)) is int


@pytest.mark.parametrize("value", ["abc", 5, [5], [["x"]], [None]])
def test_names_of_an_abort_that_cannot_be(value: Any) -> None:
    with pytest.raises(EngineError, match="request id"):
        checks.request_ids(value)


def completion(**changes: Any) -> Completion:
    made = Completion(
        request_id="mine",
        index=0,
        token_ids=np.asarray([5, 6]),
        logprobs=np.asarray([-1.0, 0.0], np.float32),
        routes=random_routes(3, SPEC),
        start=0,
        finish_reason="length",
        versions=np.zeros(2, np.int64),
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize("value", [0.0, 1e-6, 5e-4, -1e-6, -500.0])
def test_logprobs_of_sampled_tokens_are_kept_as_they_came(value: float) -> None:
    kept = completion(logprobs=np.asarray([value, -1.0], np.float32)).check(2, vocabulary=100, max_tokens=2)
    assert kept.logprobs[0] == np.float32(value)


@pytest.mark.parametrize("value", [0.002, 1.0, INFINITE, -INFINITE, NAN, -9999.0])
def test_logprobs_that_no_sampled_token_has(value: float) -> None:
    with pytest.raises(EngineError, match="mine: the log-prob of sampled token 1 is"):
        completion(logprobs=np.asarray([-1.0, value], np.float32)).check(2)


@pytest.mark.parametrize(("token", "vocabulary"), [(-1, None), (1 << 31, None), (100, 100), (-1, 100)])
def test_tokens_that_no_model_has(token: int, vocabulary: int | None) -> None:
    with pytest.raises(EngineError, match=f"mine: sampled token 1 is {token}"):
        completion(token_ids=np.asarray([5, token])).check(2, vocabulary)


def test_nothing_sampled_is_nothing_to_check() -> None:
    none = np.zeros(0, np.int64)
    empty = completion(token_ids=none, logprobs=none.astype(np.float32), versions=none, routes=Routes.missing(0, SPEC))
    assert empty.check(2, 100, 5) is empty


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 8}}, 8),
        ({"vocab_size": 7, "thinker_config": {"text_config": {"vocab_size": 9}}}, 9),
        ({}, None),
        ({"vocab_size": "7"}, None),
        ({"vocab_size": True}, None),
        ({"text_config": None}, None),
    ],
)
def test_the_vocabulary_of_a_config(config: dict[str, Any], size: int | None) -> None:
    assert checks.vocabulary_of(config) == size
