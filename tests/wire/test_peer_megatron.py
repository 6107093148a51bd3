"""Megatron's inference server: nested lists over the routed layers alone, and what is refused as ambiguous."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from router_replay import wire
from router_replay.errors import WireError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.wire.payloads import ROWS, SPEC

CHOICE: dict[str, Any] = {  # as the server sends it for a prompt of one token and a completion of two
    "index": 0,
    "message": {"role": "assistant", "content": "x"},
    "moe_topk_indices": ROWS,
    "prompt_moe_topk_indices": ROWS[:1],
    "finish_reason": "stop",
}


def test_a_choice_its_field_and_the_array_of_a_request_say_the_same() -> None:
    for form in (CHOICE, json.dumps(CHOICE), ROWS, json.dumps(ROWS).encode(), np.array(ROWS, np.int16)):
        routes = wire.from_megatron(form, SPEC)
        assert routes == Routes(ROWS, SPEC)
        assert routes.ids.dtype == np.uint8
    assert wire.from_megatron([], SPEC) == Routes.missing(0, SPEC)


def test_a_column_belongs_to_the_routed_layer_of_the_same_order() -> None:
    """Layer 0 is dense and has no entry; every other format has one."""
    assert wire.from_megatron(CHOICE, SPEC).select_layers((1,)).ids[:, 0].tolist() == [[5, 0], [3, 6]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[[0, 0], *row] for row in ROWS], "expected 3 routed layers .* got 4 of 2"),  # all decoder layers
        ([row[:2] for row in ROWS], "got 2 of 2: fewer layers come from a server with pipeline parallelism"),
        ([[one[:1] for one in row] for row in ROWS], "of 2 slots, got 3 of 1"),
        ([ROWS[0], ROWS[1][:2]], r"moe_topk_indices: expected lists \[rows\]\[routed layers\]\[slots\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, -1]]], r"moe_topk_indices: .*\$\[1\]\[2\]\[1\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, 2.0]]], r"\$\[1\]\[2\]\[1\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, True]]], r"\$\[1\]\[2\]\[1\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, 1 << 70]]], r"\$\[1\]\[2\]\[1\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, 8]]], r"row 1, layer 3: experts \[7, 8\]"),
        ([ROWS[0], [[3, 6], [0, 1], [7, 7]]], r"row 1, layer 3: experts \[7, 7\]"),
        ([ROWS[0], [[0, 0], [0, 0], [0, 0]]], r"row 1, layer 1: experts \[0, 0\]"),  # never stored by the server
        ([[], []], "expected integers"),
        (np.array(ROWS, np.float32), r"expected integers .* got float32 \[2, 3, 2\]"),
        (np.array(ROWS, np.int16) * -1, "expected an expert id of 0 or more"),
        (np.array(ROWS, np.int16)[0], r"got int16 \[3, 2\]"),
        ("nothing", "not JSON"),
        ("[" * 100_000, "Megatron"),
        (None, "moe_topk_indices"),
        (7, "moe_topk_indices"),
        ({1: 2}, "Megatron"),
        (object(), "moe_topk_indices"),
    ],
)
def test_what_is_not_the_rows_of_this_model_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.from_megatron(bad, SPEC)
    if isinstance(bad, list):
        with pytest.raises(WireError, match=message.replace(r"\$", r"\$.*")):
            wire.from_megatron(CHOICE | {"moe_topk_indices": bad, "prompt_moe_topk_indices": None}, SPEC)


def test_a_choice_without_rows_says_what_the_server_needs() -> None:
    for choice in ({"index": 0}, CHOICE | {"moe_topk_indices": None}):
        with pytest.raises(WireError, match="moe_enable_routing_replay=True"):
            wire.from_megatron(choice, SPEC)
    with pytest.raises(WireError, match=r"pass its choices\[i\]"):
        wire.from_megatron({"choices": [CHOICE]}, SPEC)


def test_the_rows_of_the_prompt_must_be_the_first_of_all() -> None:
    for prompt in (ROWS[1:], [*ROWS, ROWS[0]], [ROWS[0][::-1]]):
        with pytest.raises(WireError, match="prompt_moe_topk_indices: expected the first"):
            wire.from_megatron(CHOICE | {"prompt_moe_topk_indices": prompt}, SPEC)


def test_without_dense_layers_the_number_of_layers_is_still_that_of_the_spec() -> None:
    spec = RouterSpec(num_experts=8, top_k=2, layers=(0, 1, 2), num_layers=3)
    assert wire.from_megatron(ROWS, spec).ids.tolist() == ROWS
    with pytest.raises(WireError, match="more from multi-token prediction"):
        wire.from_megatron([[*row, row[0]] for row in ROWS], spec)
