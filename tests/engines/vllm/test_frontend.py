"""Where requests enter vLLM: forced rows become bytes that the engine core can trust, and salt the prefix cache."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import xxhash
from transformers import Qwen3Config, Qwen3MoeConfig

from router_replay import wire
from router_replay.engines.vllm.plugin.routes.frontend import check_and_salt
from router_replay.engines.vllm.requests import extra_arguments
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

vllm_exceptions = pytest.importorskip("vllm.exceptions", reason="vLLM is not installed")

CONFIG = Qwen3MoeConfig(num_hidden_layers=3, num_experts=16, num_experts_per_tok=4)
SPEC = RouterSpec.from_config(CONFIG)


def enter(extra: dict[str, Any] | None, config: Any = CONFIG, tokens: int = 6) -> Any:
    request = types.SimpleNamespace(
        prompt_token_ids=list(range(tokens)),
        sampling_params=types.SimpleNamespace(extra_args=extra),
        cache_salt="version-3",
    )
    check_and_salt(types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=config)), request)
    return request


def test_text_and_bytes_become_the_same_rows_and_the_same_salt() -> None:
    routes = random_routes(5, SPEC)
    turned = Routes(routes.ids[..., ::-1], SPEC)
    ways = [extra_arguments(routes), extra_arguments(routes, as_text=False), extra_arguments(turned, as_text=False)]
    entered = [enter({**way, "other": 1}) for way in ways]
    [salt] = {request.cache_salt for request in entered}
    assert salt.startswith("version-3#")
    for request in entered:
        assert request.sampling_params.extra_args["other"] == 1
        rows = wire.decode(request.sampling_params.extra_args["router_replay"], spec=SPEC)
        assert np.array_equal(rows.ids, np.sort(routes.ids, axis=-1))
    assert enter(extra_arguments(random_routes(5, SPEC, seed=1))).cache_salt != salt


def test_bytes_are_checked_as_text_is() -> None:
    blob = bytearray(extra_arguments(random_routes(5, SPEC), as_text=False)["router_replay"])
    blob[-1] ^= 1
    with pytest.raises(vllm_exceptions.VLLMValidationError, match=r"extra_args\.router_replay"):
        enter({"router_replay": bytes(blob)})
    with pytest.raises(vllm_exceptions.VLLMValidationError, match="5 forced rows for a prompt of 4 tokens"):
        enter(extra_arguments(random_routes(5, SPEC), as_text=False), tokens=4)
    bad = wire.encode(random_routes(5, SPEC), codec="dense")
    payload = len(bad) - 8 - 5 * SPEC.row_bytes
    forged = bad[:payload] + b"\3\3" + bad[payload + 2 : -8]
    forged += xxhash.xxh3_64_intdigest(forged).to_bytes(8, "little")
    with pytest.raises(vllm_exceptions.VLLMValidationError, match="expected 4 different experts"):
        enter({"router_replay": forged})


def test_rows_of_this_process_are_sorted_once_and_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = random_routes(5, SPEC)
    given = extra_arguments(routes, as_text=False)
    expected = enter(extra_arguments(routes))
    monkeypatch.setattr("router_replay.engines.vllm.plugin.routes.frontend.routes_of", None)
    entered = enter(given)
    assert entered.cache_salt == expected.cache_salt
    assert entered.sampling_params.extra_args == expected.sampling_params.extra_args
    assert type(entered.sampling_params.extra_args["router_replay"]) is bytes
    other = RouterSpec(16, 4, (0, 1))
    with pytest.raises(vllm_exceptions.VLLMValidationError, match="rows are those of another model"):
        enter(extra_arguments(random_routes(5, other), as_text=False))


@pytest.mark.parametrize("config", [CONFIG, Qwen3Config()], ids=["experts", "dense"])
def test_a_request_without_rows_passes_as_it_is(config: Any) -> None:
    """Also in a model without experts, which has no spec to read."""
    for extra in (None, {}, {"other": 1}):
        request = enter(extra, config)
        assert (request.cache_salt, request.sampling_params.extra_args) == ("version-3", extra)


def test_rows_for_a_model_without_experts_are_refused() -> None:
    with pytest.raises(vllm_exceptions.VLLMValidationError, match=r"extra_args\.router_replay"):
        enter(extra_arguments(random_routes(5, SPEC)), Qwen3Config())
