"""Numbers from callers are taken exactly, whatever integer type they have, or refused; none wraps around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from router_replay import RouterSpec, Routes, Sample, Trajectory, pack, wire
from router_replay.errors import BatchError, RouterReplayError, RoutesError, SpecError, StitchError, WireError
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(1, 2))
INTEGERS = [int, np.uint8, np.int16, np.uint64, lambda n: np.array(n), torch.tensor]
NO_INTEGERS = [True, np.True_, 2.0, np.float32(2), "2", None, [2]]


def filled(start: Any, **arguments: Any) -> Trajectory:
    """Two prompt tokens and a response that begins beyond them, at row 4 of 6."""
    trajectory = Trajectory(SPEC)
    trajectory.append([5, 6], [7], [-1.0], random_routes(2, SPEC))
    rows = random_routes(2, SPEC, seed=1)
    return trajectory.append([5, 6, 7, 8, 9, 1], [2], [-1.0], rows, start, allow_gap=True, **arguments)


def sample(**changes: Any) -> Sample:
    fields = {"token_ids": np.arange(8), "logprobs": np.zeros(8), "loss_mask": np.ones(8, bool), "routes": None}
    return Sample(**{**fields, **changes})


def batch(max_tokens: Any = 16, multiple: Any = 8, **changes: Any) -> Any:
    return pack([sample(**changes)], max_tokens, multiple)


WHOLE = random_routes(10, SPEC)
CALLS: dict[str, tuple[Callable[[Any], Any], int, type[RouterReplayError]]] = {
    "append start": (lambda n: filled(n).routes.ids.tolist(), 4, StitchError),
    "append version": (lambda n: filled(4, version=n).routes.versions.tolist(), 2, StitchError),
    "append start of nothing": (lambda n: len(Trajectory(SPEC).append([5, 6], [], [], None, n)), 1, StitchError),
    "missing": (lambda n: len(Routes.missing(n, SPEC)), 3, RoutesError),
    "versions": (lambda n: WHOLE.with_versions(n).versions.tolist(), 3, RoutesError),
    "prompt_length": (lambda n: Routes.join_prefill_decode(WHOLE[:6], WHOLE[6:], prompt_length=n), 6, RoutesError),
    "decode_start": (lambda n: Routes.join_prefill_decode(WHOLE[:6], WHOLE[6:], decode_start=n), 6, RoutesError),
    "take": (lambda n: WHOLE.take([n]).ids.tolist(), 3, RoutesError),
    "select_layers": (lambda n: WHOLE.select_layers([n]).ids.tolist(), 2, SpecError),
    "encode": (lambda n: wire.encode(WHOLE, start=n, token_ids=range(210)), 200, WireError),
    "to_prime_rl": (lambda n: wire.to_prime_rl(WHOLE, start=n), 3, WireError),
    "to_dynamo": (lambda n: wire.to_dynamo(WHOLE, start=n), 3, WireError),
    "from_prime_rl": (lambda n: wire.from_prime_rl(wire.to_prime_rl(WHOLE), SPEC, prompt_length=n), 3, WireError),
    "max_bytes": (lambda n: wire.decode(wire.encode(WHOLE), max_bytes=n), 100, WireError),
    "threads": (lambda n: wire.encode(WHOLE, threads=n), 2, WireError),
    "max_tokens": (lambda n: len(batch(max_tokens=n)), 16, BatchError),
    "pad_to_multiple_of": (lambda n: len(batch(multiple=n)), 16, BatchError),
    "rank": (lambda n: batch().shard(n, 4, "zigzag").token_ids.tolist(), 3, BatchError),
    "size": (lambda n: batch(multiple=100, max_tokens=100).shard(0, n, "zigzag").token_ids.tolist(), 50, BatchError),
    "num_experts": (lambda n: RouterSpec(n, 1, (0,)), 3, SpecError),
    "top_k": (lambda n: RouterSpec(8, n, (0,)), 3, SpecError),
    "layers": (lambda n: RouterSpec(8, 2, (0, n)), 3, SpecError),
    "num_layers": (lambda n: RouterSpec(8, 2, (0,), num_layers=n).num_layers, 3, SpecError),
}


def result(call: Callable[[Any], Any], value: Any) -> Any:
    try:
        return call(value)
    except RouterReplayError as error:
        return str(error)


@pytest.mark.parametrize("call", CALLS)
def test_every_integer_type_means_the_same(call: str) -> None:
    work, value, _ = CALLS[call]
    for kind in INTEGERS:
        assert result(work, kind(value)) == result(work, value), kind


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_integer_is_refused(call: str, value: Any) -> None:
    work, _, error = CALLS[call]
    if value is None and call in ("num_layers", "versions", "prompt_length", "decode_start", "max_bytes"):
        return  # their way to say nothing
    if (value is None and call == "from_prime_rl") or (isinstance(value, list) and call in ("take", "versions")):
        return
    with pytest.raises(error):
        work(value)


@pytest.mark.parametrize("call", CALLS)
def test_what_no_int64_holds_is_refused(call: str) -> None:
    work, _, error = CALLS[call]
    if call in ("max_tokens", "max_bytes", "from_prime_rl", "threads"):  # a limit may be any number
        return
    for value in (2**64 - 1, np.uint64(2**64 - 1), 2**70):
        with pytest.raises(error):
            work(value)


def test_a_response_behind_a_gap_keeps_its_rows_whatever_type_start_has() -> None:
    """np.uint64(4) - 2 rows wrapped around, and the rows were lost."""
    trajectory = filled(np.uint64(4))
    assert trajectory.routes.captured.tolist() == [True, True, False, False, True, True, False]
    assert trajectory.routes[4:6].same_sets(random_routes(2, SPEC, seed=1))


HUGE = np.array([1, 2**64 - 1], np.uint64)


def test_token_ids_beyond_int64_are_refused_with_their_place() -> None:
    message = r"must be integers up to 2\*\*63 - 1, got 18446744073709551615 at position 1"
    with pytest.raises(StitchError, match=f"prompt_ids {message}"):
        Trajectory(SPEC).append(HUGE, [], [], None)
    with pytest.raises(StitchError, match=f"completion_ids {message}"):
        Trajectory(SPEC).append([1], HUGE, [-1.0, -1.0], None, allow_gap=True)
    with pytest.raises(BatchError, match=f"sample 0: token_ids {message}"):
        pack([Sample(HUGE, np.zeros(2), np.zeros(2, bool), None)], 8)
    with pytest.raises(WireError, match=f"token_ids {message}"):
        wire.encode(WHOLE[:1], token_ids=HUGE)
    fits = np.array([1, 2**63 - 1], np.uint64)
    assert Trajectory(SPEC).append(fits, [], [], None).token_ids.tolist() == [1, 2**63 - 1]


@pytest.mark.parametrize("ragged", [[[1], [1, 2]], [1, [2]], ["a", 1]])
def test_what_is_no_array_is_our_error(ragged: list) -> None:
    with pytest.raises(StitchError, match="prompt_ids"):
        Trajectory(SPEC).append(ragged, [], [], None)
    with pytest.raises(StitchError, match="logprobs"):
        Trajectory(SPEC).append([1], [2, 3], ragged, None, allow_gap=True)
    with pytest.raises(RoutesError, match="ids"):
        Routes(ragged, SPEC)
    with pytest.raises(BatchError, match="sample 0: logprobs"):
        batch(token_ids=np.arange(2), loss_mask=np.ones(2, bool), logprobs=ragged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": np.full(8, 0.5)}, r"sample 0: loss_mask must be booleans, or 0 and 1, got 0.5 at position 0"),
        ({"loss_mask": [0, 1, 2, 0, 0, 0, 0, 0]}, "loss_mask .* got 2 at position 2"),
        ({"loss_mask": [0, 1, np.nan, 0, 0, 0, 0, 0]}, "loss_mask .* got nan at position 2"),
        ({"loss_mask": ["0"] * 8}, "loss_mask must be booleans"),
        ({"advantages": np.nan}, "sample 0: advantages: the value at position 0 is nan"),
        ({"advantages": [0, 0, -np.inf, 0, 0, 0, 0, 0]}, "advantages: the value at position 2 is -inf"),
        ({"advantages": [1e39] * 8}, "advantages: the value at position 0 is inf"),
        ({"advantages": "high"}, "advantages must be numbers"),
        ({"advantages": [[1.0], 2.0]}, "sample 0: advantages cannot be converted to an array"),
        ({"advantages": None}, "advantages must be numbers"),
        ({"routes": np.zeros((8, 2, 2))}, "sample 0: routes must be a Routes or None, got ndarray"),
        ({"logprobs": [0, 0, 0, np.nan, 0, 0, 0, 0]}, "logprobs of tokens that bear loss: .* position 3 is nan"),
        ({"logprobs": [0, 0, 0, -np.inf, 0, 0, 0, 0]}, "logprobs of tokens that bear loss: .* position 3 is -inf"),
    ],
)
def test_what_would_spoil_a_loss_is_refused_with_sample_position_and_value(changes: dict, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch(**changes)


def test_masks_of_zeros_and_ones_and_unknown_logprobs_of_prompts_are_taken() -> None:
    mask = [0, 0, 0, 1, 1, 1, 0, 1]
    logprobs = [np.nan, -np.inf, 0, -1, -1, -1, np.inf, -1]
    for kind in (int, float, np.uint8, bool):
        packed = batch(loss_mask=np.array(mask, kind), logprobs=logprobs)
        assert packed.loss_mask.dtype == bool
        assert packed.loss_mask.tolist() == [bool(value) for value in mask]


@pytest.mark.parametrize("logprob", [np.nan, np.inf, -np.inf, 1e300])
def test_a_sampled_token_without_a_finite_logprob_is_refused(logprob: float) -> None:
    with pytest.raises(StitchError, match="logprobs of the completion: the value at position 1 is"):
        Trajectory(SPEC).append([1], [2, 3], [-1.0, logprob], None, allow_gap=True)


def test_pad_token_and_order_are_taken_exactly() -> None:
    with pytest.raises(BatchError, match=r"pad_token_id must be an integer, got 0\.5"):
        pack([sample()], 16, 16, pad_token_id=0.5)  # type: ignore[arg-type]
    assert pack([sample()], 16, 16, pad_token_id=-7).token_ids[-1] == -7
    with pytest.raises(SpecError, match="ordered must be True or False, got 'no'"):
        RouterSpec(8, 2, (0,), ordered="no")  # type: ignore[arg-type]


def test_a_trajectory_keeps_what_it_was_given() -> None:
    prompt, completion, logprobs = np.array([5, 6]), np.array([7, 8]), np.array([-1.0, -2.0], np.float32)
    ids = random_routes(3, SPEC).ids.copy()
    trajectory = Trajectory(SPEC).append(prompt, completion, logprobs, Routes(ids, SPEC))
    for array in (prompt, completion, logprobs, ids):
        array[:] = 0
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8]
    assert trajectory.logprobs.tolist() == [0, 0, -1, -2]
    assert trajectory.routes[:3].same_sets(random_routes(3, SPEC))
