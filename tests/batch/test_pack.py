"""pack and shard: rule 1 (rows follow tokens by the same code) and rule 3 (a missing row in the loss raises)."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay import RouterSpec, Routes, Sample, Trajectory, pack
from router_replay.batch import NO_LABEL, Batch, shard_index
from router_replay.batch.packing import first_fit_decreasing
from router_replay.errors import BatchError
from tests.makers import random_ids

SPEC = RouterSpec(num_experts=300, top_k=2, layers=(1, 2, 4))


def make_sample(number: int, length: int, captured: np.ndarray | None = None) -> Sample:
    """Token and first expert of a row are one number, unique in the batch: whoever parts them is seen."""
    tokens = 20 * number + np.arange(length)
    ids = np.stack([np.stack([tokens % 300, (tokens + 1 + layer) % 300], -1) for layer in range(3)], 1)
    routes = Routes(ids, SPEC, captured=captured, versions=np.full(length, number))
    mask = np.arange(length) % 3 > 0
    return Sample(tokens, -tokens / 100.0, mask, routes, advantages=tokens / 10.0, versions=tokens + 7)


def check_slots(batch: Batch) -> None:
    """Everything that stands in a slot speaks of the same token."""
    real = batch.sample_ids >= 0
    tokens = batch.token_ids
    assert np.array_equal(batch.position_ids[real], tokens[real] % 20)
    assert np.array_equal(batch.sample_ids[real], tokens[real] // 20)
    assert np.allclose(batch.logprobs[real], -tokens[real] / 100.0)
    assert np.allclose(batch.advantages[real], tokens[real] / 10.0)
    assert np.array_equal(batch.versions[real], tokens[real] + 7)
    assert np.array_equal(batch.loss_mask[real], tokens[real] % 20 % 3 > 0)
    assert batch.routes is not None
    captured = batch.routes.captured
    assert not captured[~real].any()
    assert np.array_equal(batch.routes.ids[captured][:, 0, 0], tokens[captured])
    assert np.array_equal(batch.routes.ids[captured][:, -1, 1], tokens[captured] + 3)
    assert np.array_equal(batch.routes.versions[captured], tokens[captured] // 20)
    labelled = batch.labels != NO_LABEL
    assert np.array_equal(batch.labels[labelled], tokens[labelled] + 1)
    assert np.allclose(batch.label_logprobs[labelled], -batch.labels[labelled] / 100.0)
    assert np.allclose(batch.label_advantages[labelled], batch.labels[labelled] / 10.0)
    assert np.array_equal(batch.label_versions[labelled], batch.labels[labelled] + 7)
    assert np.array_equal(batch.label_mask[labelled], batch.labels[labelled] % 20 % 3 > 0)
    assert not batch.label_mask[~labelled].any()
    assert not batch.loss_mask[~real].any()


lengths = st.lists(st.integers(1, 14), min_size=1, max_size=14)


@given(lengths, st.sampled_from([1, 2, 4, 8]))
def test_rows_follow_tokens_and_nothing_is_lost(lengths: list[int], multiple: int) -> None:
    samples = [make_sample(number, length) for number, length in enumerate(lengths)]
    batch = pack(samples, max_tokens=16, pad_to_multiple_of=multiple)
    check_slots(batch)
    assert (batch.labels != NO_LABEL).sum() == sum(length - 1 for length in lengths)
    for sample, tokens in zip(samples, batch.per_sample(batch.token_ids), strict=True):
        assert np.array_equal(tokens, sample.token_ids)
    for micro in batch.bins():
        check_slots(micro)
        assert len(micro) <= 16
        assert len(micro) % multiple == 0
        assert micro.cu_seqlens[0] == 0
        assert micro.cu_seqlens[-1] == len(micro)
    assert np.array_equal(np.concatenate([micro.token_ids for micro in batch.bins()]), batch.token_ids)


@given(lengths, st.sampled_from([1, 2, 4]), st.sampled_from(["contiguous", "zigzag"]))
def test_the_shards_are_the_whole(lengths: list[int], size: int, kind: str) -> None:
    batch = pack([make_sample(n, length) for n, length in enumerate(lengths)], 16, pad_to_multiple_of=2 * size)
    shards = [batch.shard(rank, size, kind) for rank in range(size)]
    slots = np.concatenate([shard.slots for shard in shards])
    assert sorted(slots.tolist()) == list(range(len(batch)))
    for shard in shards:
        check_slots(shard)
        assert len(shard) * size == len(batch)
        assert np.array_equal(shard.token_ids, batch.token_ids[shard.slots])
        assert np.array_equal(shard.cu_seqlens, batch.cu_seqlens)


def test_zigzag_gives_each_rank_an_early_and_a_late_piece_of_every_sequence() -> None:
    batch = pack([make_sample(0, 8), make_sample(1, 4)], 16, pad_to_multiple_of=4)
    assert batch.shard(0, 2, "zigzag").token_ids.tolist() == [0, 1, 6, 7, 20, 23]
    assert batch.shard(1, 2, "zigzag").token_ids.tolist() == [2, 3, 4, 5, 21, 22]


def test_what_leaves_for_a_rank_is_its_share() -> None:
    spec = RouterSpec(128, 8, tuple(range(48)))
    tokens = np.arange(4096)
    sample = Sample(tokens, np.zeros(4096), np.ones(4096, bool), Routes(random_ids(4096, spec), spec))
    batch = pack([sample], 4096, on_missing="raise")
    whole = len(pickle.dumps(batch))
    for rank in range(8):
        local = batch.shard(rank, 8)
        assert local.routes is not None
        assert len(pickle.dumps(local)) < whole / 8 * 1.01 + 2000
        assert not np.shares_memory(local.routes.ids, batch.routes.ids)  # else the whole stays in memory
        stage = local.select_layers(range(12, 24))
        assert stage.routes is not None
        assert stage.routes.nbytes == 4096 // 8 * 12 * 8
        assert stage.routes.ids.base is None or stage.routes.ids.base.nbytes == stage.routes.nbytes


def test_select_layers_is_the_columns_of_those_layers() -> None:
    batch = pack([make_sample(0, 6)], 16)
    stage = batch.select_layers([2, 4])
    assert stage.routes.spec.layers == (2, 4)
    assert np.array_equal(stage.routes.ids, batch.routes.ids[:, 1:])
    with pytest.raises(ValueError, match=r"layers \[3\] have no router"):
        batch.select_layers([3])


def test_first_fit_decreasing_is_what_it_says() -> None:
    assert first_fit_decreasing([3, 7, 5, 2, 2], 10).bins == ((1, 0), (2, 3, 4))
    assert first_fit_decreasing([4, 4, 4], 4).bins == ((0,), (1,), (2,))


def test_a_missing_row_in_the_loss_raises_unless_live_was_chosen() -> None:
    missing = np.arange(8) != 4  # row 4 predicts token 5, which bears loss
    with pytest.raises(BatchError, match="sample 1: row 4 predicts token 5"):
        pack([make_sample(0, 8), make_sample(1, 8, missing)], 32)
    batch = pack([make_sample(0, 8), make_sample(1, 8, missing)], 32, on_missing="live")
    assert batch.routes.captured.tolist() == [True] * 8 + missing.tolist()


@pytest.mark.parametrize("row", [2, 7])  # row 2 predicts token 3, which bears none; row 7 is the last
def test_a_missing_row_outside_the_loss_is_routed_live(row: int) -> None:
    batch = pack([make_sample(0, 8, np.arange(8) != row)], 32)
    assert batch.routes.captured.tolist() == (np.arange(8) != row).tolist()


def test_a_trajectory_packs_as_it_is() -> None:
    trajectory = Trajectory(SPEC)
    rows = make_sample(0, 5).routes
    trajectory.append([0, 1, 2], [3, 4], [-0.3, -0.4], rows[:4])
    batch = pack([Sample.of(trajectory, advantages=2.0), trajectory], 16)
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 4] * 2
    assert batch.label_mask.tolist() == [False, False, True, True, False] * 2
    assert batch.label_advantages.tolist() == [2.0, 2.0, 2.0, 2.0, 0.0] + [0.0] * 5


def test_without_routes_there_is_nothing_to_replay() -> None:
    sample = Sample(np.arange(3), np.zeros(3), np.ones(3, bool), None)
    assert pack([sample], 4).routes is None
    with pytest.raises(BatchError, match="sample 0 has no routes, but other samples have"):
        pack([sample, make_sample(0, 3)], 8)


@pytest.mark.parametrize(
    ("samples", "arguments", "message"),
    [
        ([], {}, "samples is empty"),
        ([make_sample(0, 9)], {"pad_to_multiple_of": 8, "max_tokens": 15}, r"sample 0 needs 16 slots \(9 tokens"),
        ([make_sample(0, 3)], {"pad_to_multiple_of": 0}, "at least 1"),
        ([make_sample(0, 3)], {"on_missing": "ignore"}, "on_missing must be"),
        (
            [Sample(np.arange(3), np.zeros(2), np.ones(3, bool), None)],
            {},
            r"sample 0: logprobs .* expected \[3\], got \[2\]",
        ),
        (
            [Sample(np.arange(3), np.zeros(3), np.ones(3, bool), Routes.missing(2, SPEC))],
            {},
            "one row per token: expected 3, got 2",
        ),
        ([Sample(np.zeros(0, int), np.zeros(0), np.ones(0, bool), None)], {}, "sample 0: token_ids is empty"),
    ],
)
def test_what_cannot_be_packed_is_refused(samples: list, arguments: dict, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        pack(samples, **{"max_tokens": 16, **arguments})


@pytest.mark.parametrize(
    ("rank", "size", "kind", "message"),
    [
        (2, 2, "contiguous", "rank 2 of size 2"),
        (0, 2, "ring", "kind must be one of"),
        (0, 4, "contiguous", "bin 0 has 6 slots.*pad_to_multiple_of=4"),
        (0, 2, "zigzag", "sequence 0 has 6 slots.*pad_to_multiple_of=4"),
    ],
)
def test_a_shard_that_cannot_be_cut_is_refused(rank: int, size: int, kind: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        pack([make_sample(0, 6)], 16).shard(rank, size, kind)  # type: ignore[arg-type]


def test_a_shard_is_not_cut_again() -> None:
    local = pack([make_sample(0, 8)], 16).shard(0, 2)
    with pytest.raises(BatchError, match="needs the whole batch"):
        local.shard(0, 2)


def test_the_batch_of_the_docs() -> None:
    """The table of router_replay.batch.types, and what padding holds."""
    mask = np.array([False, True, True])
    first = Sample(np.array([5, 6, 7]), np.array([-0.5, -1.0, -2.0]), mask, None, advantages=3.0)
    second = Sample(np.array([8, 9]), np.array([-4.0, -8.0]), mask[1:], None, advantages=4.0)
    batch = pack([first, second], 8, pad_to_multiple_of=4)
    assert batch.token_ids.tolist() == [5, 6, 7, 0, 8, 9, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.sample_ids.tolist() == [0, 0, 0, -1, 1, 1, -1, -1]
    assert batch.labels.tolist() == [6, 7, -100, -100, 9, -100, -100, -100]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, True, False, False]
    assert batch.label_mask.tolist() == [True, True, False, False, True, False, False, False]
    assert batch.logprobs.tolist() == [-0.5, -1.0, -2.0, 0.0, -4.0, -8.0, 0.0, 0.0]
    assert batch.label_logprobs.tolist() == [-1.0, -2.0, 0.0, 0.0, -8.0, 0.0, 0.0, 0.0]
    assert batch.advantages.tolist() == [3.0, 3.0, 3.0, 0.0, 4.0, 4.0, 0.0, 0.0]
    assert batch.label_advantages.tolist() == [3.0, 3.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert (batch.bin_ends.tolist(), batch.num_bins) == ([8], 1)
    assert batch.slots.tolist() == list(range(8))
    assert (batch.cu_seqlens.dtype, batch.routes, batch.shard_of) == (np.int32, None, None)


def test_padding_holds_the_token_that_was_asked_for() -> None:
    assert pack([make_sample(0, 3)], 8, 4, pad_token_id=-7).token_ids.tolist() == [0, 1, 2, -7]
    with pytest.raises(BatchError, match="pad_token_id must be an integer"):
        pack([make_sample(0, 3)], 8, pad_token_id=0.5)  # type: ignore[arg-type]


def test_samples_of_two_models_do_not_go_into_one_batch() -> None:
    other = Sample(np.arange(2), np.zeros(2), np.ones(2, bool), Routes.missing(2, RouterSpec(8, 2, (0,))))
    with pytest.raises(BatchError, match="sample 1 is of another model"):
        pack([make_sample(0, 3), other], 8, on_missing="live")


@pytest.mark.parametrize("max_tokens", [0, -1, 4.0])
def test_a_bin_has_room_for_one_token_at_least(max_tokens: int) -> None:
    with pytest.raises(BatchError, match="max_tokens must be"):
        pack([make_sample(0, 1)], max_tokens)
    assert len(pack([make_sample(0, 1)], 1)) == 1


def test_values_are_split_by_sample_with_and_without_padding() -> None:
    for multiple in (1, 4):
        batch = pack([make_sample(0, 3), make_sample(1, 5), make_sample(2, 1)], 8, multiple)
        assert [len(piece) for piece in batch.per_sample(np.zeros((len(batch), 2)))] == [3, 5, 1]
    with pytest.raises(BatchError, match=r"one entry per slot: expected 16, got \[15\]"):
        batch.per_sample(np.zeros(15))


def test_a_shard_says_whose_it_is_and_has_no_bins() -> None:
    shard = pack([make_sample(0, 8), make_sample(1, 4)], 8).shard(1, 2)
    assert shard.shard_of == (1, 2, "contiguous")
    assert shard.bin_ends.tolist() == [4, 6]
    with pytest.raises(BatchError, match=r"bins\(\) needs the whole batch, got a shard \(contiguous, rank 1 of 2\)"):
        next(shard.bins())


@pytest.mark.parametrize(("rank", "size", "message"), [(-1, 2, "rank -1 of size 2"), (0, 0, "size must be at least 1")])
def test_ranks_count_from_zero_up_to_the_size(rank: int, size: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        pack([make_sample(0, 4)], 8).shard(rank, size)


def test_no_sequences_give_no_slots() -> None:
    empty = np.zeros(1, np.int32)
    assert shard_index(empty, empty, 0, 2, "zigzag").tolist() == []
