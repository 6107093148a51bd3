"""The parts of the integration with TRL that need no TRL: rows in TRL's layout, trajectories by their tokens."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
import torch

from router_replay.engines import Completion, Request, Sampling
from router_replay.errors import ConfigError, ReplayError, StitchError
from router_replay.integrations.trl.rows import CAPTURED, IDS, BatchRows, Laid, predicts
from router_replay.integrations.trl.sequences import Sequences
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(0, 2))


def laid(prompt: int, completion: int, seed: int) -> Laid:
    rows = random_routes(prompt + completion - 1, SPEC, seed)
    return Laid(prompt, completion, Routes.concat([rows, Routes.missing(1, SPEC)]))


def test_prompts_end_and_completions_begin_at_the_same_slot() -> None:
    sequences = [laid(2, 3, 0), laid(4, 1, 1)]
    rows = BatchRows.laid_out(sequences, width=5, length=4, spec=SPEC)
    assert rows.captured.int().tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0, 0]]
    for number, one in enumerate(sequences):
        captured = rows.captured[number]
        assert torch.equal(rows.ids[number][captured], torch.from_numpy(one.routes.ids[:-1]))
    assert rows.ids.dtype is torch.uint8
    part = rows.part(1, 2, SPEC, torch.device("cpu"))
    assert torch.equal(part.ids, rows.ids[1])
    assert not part.all_captured


def test_rows_survive_a_shuffle_of_the_batch_dict() -> None:
    rows = BatchRows.laid_out([laid(2, 2, seed) for seed in range(4)], 2, 2, SPEC)
    order = torch.tensor([2, 0, 3, 1])
    found = BatchRows.of_batch({name: tensor[order] for name, tensor in rows.as_batch().items()})
    assert found is not None
    assert torch.equal(found.ids, rows.ids[order])
    assert set(rows.as_batch()) == {IDS, CAPTURED}
    assert BatchRows.of_batch({"prompt_ids": order}) is None


@pytest.mark.parametrize(("width", "length"), [(1, 3), (2, 2)])
def test_a_sequence_that_does_not_fit_is_refused(width: int, length: int) -> None:
    with pytest.raises(ReplayError, match=r"sequence 0: 2 \+ 3 tokens with 5 rows do not fit"):
        BatchRows.laid_out([laid(2, 3, 0)], width, length, SPEC)


def test_rows_of_other_tokens_are_refused() -> None:
    with pytest.raises(ReplayError, match="with 3 rows do not fit"):
        BatchRows.laid_out([Laid(2, 3, random_routes(3, SPEC))], 2, 3, SPEC)


def test_only_rows_that_predict_a_token_are_needed() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0]])
    assert predicts(mask).int().tolist() == [[0, 1, 1, 0, 0]]
    complete = BatchRows(torch.zeros(1, 5, 2, 2), torch.tensor([[False, True, True, False, False]]))
    complete.refuse_missing(mask)
    with pytest.raises(ReplayError, match="1 rows are missing, the first in sequence 0, slot 2"):
        BatchRows(complete.ids, torch.tensor([[False, True, False, False, False]])).refuse_missing(mask)


def answer(prompt: list[int], tokens: list[int], start: int = 0, seed: int = 0) -> Completion:
    count = len(prompt) + len(tokens) - 1 - start
    return Completion.assemble(
        Request(prompt, Sampling(max_tokens=len(tokens)), start), 0, spec=SPEC, token_ids=tokens,
        logprobs=np.full(len(tokens), -1.0), routes=random_routes(count, SPEC, seed), versions=0, finish_reason="stop",
    )  # fmt: skip


def test_a_longer_prompt_continues_the_trajectory_with_the_longest_beginning() -> None:
    sequences = Sequences(SPEC)
    prompts = [[5, 6], [5, 6, 7]]
    for number, (trajectory, prompt) in enumerate(zip(sequences.of_prompts(prompts), prompts, strict=True)):
        sequences.add(trajectory, prompt, answer(prompt, [8], seed=number))
    further = [5, 6, 7, 8, 1]
    [trajectory] = sequences.of_prompts([further])
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8]
    known = trajectory.start_for(further)
    assert known == 3
    before = trajectory.routes.ids[:known].copy()
    sequences.add(trajectory, further, answer(further, [9], start=known, seed=7))
    routes = sequences.take([*further, 9])
    assert np.array_equal(routes.ids[:known], before)
    assert routes.captured.tolist() == [True] * 5 + [False]
    assert len(sequences.take([5, 6, 8])) == 3
    with pytest.raises(StitchError, match="no rollout of this batch begins with these 3 tokens"):
        sequences.take([5, 6, 8])


def test_equal_sequences_are_told_apart_by_their_order() -> None:
    sequences = Sequences(SPEC)
    prompts = [[5, 6]] * 3
    given = [answer([5, 6], [8, 9], seed=seed) for seed in range(3)]
    for trajectory, prompt, one in zip(sequences.of_prompts(prompts), prompts, given, strict=True):
        sequences.add(trajectory, prompt, one)
    for one in given:
        assert np.array_equal(sequences.take([5, 6, 8, 9]).ids[:-1], one.routes.ids)


def test_an_end_that_trl_cut_off_is_cut_off_the_rows() -> None:
    sequences = Sequences(SPEC)
    [trajectory] = sequences.of_prompts([[5, 6]])
    given = answer([5, 6], [8, 9, 1])
    sequences.add(trajectory, [5, 6], given)
    routes = sequences.take([5, 6, 8])
    assert np.array_equal(routes.ids, given.routes.ids[:3])
    assert routes.captured.all()


def test_without_trl_the_import_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="TRL is not installed: pip install"):
        from router_replay.integrations.trl import RouterReplayGRPOTrainer  # noqa: F401
