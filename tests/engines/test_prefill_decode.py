"""Servers whose rows are not their tokens' own are refused; a prefill and a decode answer become one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Completion
from router_replay.engines.prefill_decode import join_prefill_decode, without_prompt_rows
from router_replay.engines.stale import check_server, stale_reasons
from router_replay.errors import EngineError, RoutesError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=4, layers=(0, 1))
PROMPT = 5

SGLANG = {
    "enable_hierarchical_cache": False, "hicache_storage_backend": None, "enable_lmcache": False, "dcp_size": 1,
    "attn_cp_size": 1, "pp_size": 1, "disaggregation_mode": "null", "cpu_offload_gb": 0, "tp_size": 8, "ep_size": 8,
}  # fmt: skip
VLLM = {
    "kv_transfer_config": None, "kv_offloading_size": None, "kv_offloading_backend": "native",
    "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    "tensor_parallel_size": 8,
}  # fmt: skip


def completion(tokens: list[int], start: int, routes: Routes, version: int = 0, **changes: Any) -> Completion:
    made = Completion(
        request_id="r",
        index=0,
        token_ids=np.asarray(tokens),
        logprobs=np.zeros(len(tokens), np.float32),
        routes=routes,
        start=start,
        finish_reason="length",
        versions=np.full(len(tokens), version),
    )
    return dataclasses.replace(made, **changes)


WHOLE = random_routes(PROMPT + 4 - 1, SPEC)
PREFILL = completion([9], 0, WHOLE[:PROMPT])
DECODE = completion([9, 8, 7, 6], PROMPT, WHOLE[PROMPT:])


@pytest.mark.parametrize("settings", [SGLANG, VLLM, {}])
def test_plain_servers_are_fine(settings: dict[str, Any]) -> None:
    check_server(settings)


@pytest.mark.parametrize(
    ("settings", "name", "value", "reason"),
    [
        (SGLANG, "enable_hierarchical_cache", True, "offloaded"),
        (SGLANG, "hicache_storage_backend", "mooncake", "from outside"),
        (SGLANG, "enable_lmcache", True, "from outside"),
        (SGLANG, "enable_flexkv", True, "from outside"),
        (SGLANG, "dcp_size", 2, "its own part of the sequence"),
        (SGLANG, "attn_cp_size", 2, "its own part of the sequence"),
        (SGLANG, "pp_size", 2, "its own layers"),
        (SGLANG, "disaggregation_mode", "prefill", "join_prefill_decode"),
        (SGLANG, "disaggregation_mode", "decode", "join_prefill_decode"),
        (SGLANG, "disaggregation_decode_enable_offload_kvcache", True, "offloaded"),
        (VLLM, "kv_transfer_config", {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "from outside"),
        (VLLM, "kv-offloading-size", 16.0, "offloaded"),
        (VLLM, "pipeline_parallel_size", 2, "its own layers"),
        (VLLM, "decode_context_parallel_size", 2, "its own part of the sequence"),
        (VLLM, "prefill-context-parallel-size", 2, "its own part of the sequence"),
    ],
)
def test_stale_combinations_are_refused(settings: dict[str, Any], name: str, value: Any, reason: str) -> None:
    with pytest.raises(EngineError, match=reason) as caught:
        check_server({**settings, name: value}, server="http://here")
    assert name.replace("-", "_") in str(caught.value)
    assert "http://here" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "right"), [((0, 26), False), ((0, 30), False), ((0, 31), True), ((0, 32), True), (None, False)]
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_offloading_size", 16.0),
        ("kv_transfer_config", {"kv_connector": "OffloadingConnector"}),
        ("kv_connector", "LMCacheConnectorV1"),
    ],
)
def test_kv_from_elsewhere_is_right_from_vllm_0_31_on(
    version: tuple[int, int] | None, right: bool, name: str, value: Any
) -> None:
    assert bool(stale_reasons({**VLLM, name: value}, version=version)) != right


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
@pytest.mark.parametrize("version", [(0, 26), (0, 30), (0, 32)])
def test_ranks_that_hold_a_part_of_the_rows_are_wrong_in_every_version(name: str, version: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match=name):
        check_server({**VLLM, name: 2}, version=version)


def test_every_reason_is_named() -> None:
    assert len(stale_reasons({"pp_size": 2, "enable_lmcache": True, "dcp_size": 4})) == 3


def test_a_connector_that_is_not_named_is_none() -> None:
    check_server({"kv_transfer_config": {"kv_connector": None, "kv_buffer_device": "cuda"}})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_of_a_pair_by_its_role(role: Any) -> None:
    check_server({**SGLANG, "disaggregation_mode": role}, role)
    with pytest.raises(EngineError):
        check_server({**SGLANG, "disaggregation_mode": "decode" if role == "prefill" else "prefill"}, role)


def test_joined_rows_are_the_whole_runs() -> None:
    joined = join_prefill_decode(PREFILL, DECODE, PROMPT)
    assert joined.routes == WHOLE
    assert joined.start == 0
    assert joined.token_ids.tolist() == [9, 8, 7, 6]


@pytest.mark.parametrize("decode_start", [0, 2, 4, 5])
def test_the_decode_servers_prompt_rows_are_not_used(decode_start: int) -> None:
    """Their KV came over the wire: the slots hold rows of other tokens."""
    stale = random_routes(PROMPT, SPEC, seed=9)
    decode = completion([9, 8, 7, 6], decode_start, Routes.concat([stale[decode_start:], WHOLE[PROMPT:]]))
    assert join_prefill_decode(PREFILL, decode, PROMPT).routes.same_sets(WHOLE)


def test_rows_that_the_caller_knows_stay_out() -> None:
    prefill = completion([9], 3, WHOLE[3:PROMPT])
    joined = join_prefill_decode(prefill, DECODE, PROMPT)
    assert joined.start == 3
    assert joined.routes.same_sets(WHOLE[3:])


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ({}, {"request_id": "other"}, "two requests"),
        ({}, {"index": 1}, "two requests"),
        ({"token_ids": np.asarray([3])}, {}, "first token is 3"),
        ({"versions": np.asarray([1])}, {}, r"policy versions \[0, 1\]"),
        ({}, {"versions": np.asarray([0, 0, 1, 1])}, r"policy versions \[0, 1\]"),
        ({"routes": WHOLE[: PROMPT - 1]}, {}, "expected 5 rows"),
        ({"routes": WHOLE[: PROMPT + 1]}, {}, "expected 5 rows"),
        ({}, {"start": 6}, "expected at most 5, the end of the prompt"),
        ({}, {"routes": WHOLE[PROMPT + 1 :]}, "expected 3 decode rows"),
        ({}, {"start": 4}, "expected 4 decode rows"),
        ({}, {"token_ids": np.zeros(0, np.int64)}, "but nothing from the decode server"),
    ],
)
def test_answers_that_do_not_belong_together(prefill: dict[str, Any], decode: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        join_prefill_decode(dataclasses.replace(PREFILL, **prefill), dataclasses.replace(DECODE, **decode), PROMPT)


def test_a_prefill_server_that_went_on() -> None:
    with pytest.raises(EngineError, match="exactly one token"):
        join_prefill_decode(completion([9, 8], 0, WHOLE[: PROMPT + 1]), DECODE, PROMPT)


def test_a_prompt_row_that_nobody_captured() -> None:
    captured = np.arange(PROMPT) != 2
    prefill = dataclasses.replace(PREFILL, routes=Routes(WHOLE.ids[:PROMPT], SPEC, captured=captured))
    with pytest.raises(RoutesError, match="prompt row 2"):
        join_prefill_decode(prefill, DECODE, PROMPT)


def test_a_decode_answer_alone_has_no_prompt_rows() -> None:
    alone = without_prompt_rows(completion([9, 8, 7, 6], 2, WHOLE[2:]), PROMPT)
    assert alone.routes.captured.tolist() == [False] * 3 + [True] * 3
