"""The operation that chooses is answered with the recorded ids, and every other operation is left alone.

Each test plays the lines of a router that ask for the choice, on scores that are easy to follow, without a model.
Shapes: T tokens, K top-k, E experts, G groups, N keys of each half.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from router_replay.errors import ReplayError
from router_replay.replay.selection import ArgmaxSelection, GroupedSelection, Selection
from router_replay.replay.special import ProductKeySelection, SparseMixerSelection

LIVE_ROWS = torch.tensor([[False], [True], [False], [True]])


def router(experts: int = 6, top_k: int = 2, groups: int = 1, training: bool = False, **module: Any) -> Any:
    return types.SimpleNamespace(
        layer=3,
        num_experts=experts,
        top_k=top_k,
        num_groups=groups,
        module=types.SimpleNamespace(training=training, **module),
    )


def scores(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def mixed(recorded: Tensor, live: Tensor) -> Tensor:
    return torch.where(LIVE_ROWS, live, recorded)


IDS = torch.tensor([[5, 0], [1, 2], [4, 3], [0, 1]])


# -- one topk over all experts --------------------------------------------------------------------


@pytest.mark.parametrize(
    "choose",
    [
        lambda scores: torch.topk(scores, 2),
        lambda scores: torch.topk(scores, 2, -1),
        lambda scores: torch.topk(scores, 2, 1, sorted=False),
        lambda scores: torch.topk(scores, k=2, dim=1),
        lambda scores: scores.topk(2),
        lambda scores: scores.topk(k=2, dim=-1),
    ],
)
def test_topk_gives_the_recorded_ids_and_the_live_scores_of_them(choose: Callable[[Tensor], Any]) -> None:
    live = scores(4, 6)
    with Selection(router(), IDS, None, compare=False) as selection:
        values, indices = choose(live)
    assert torch.equal(indices, IDS)
    assert torch.equal(values, live.gather(-1, IDS))
    assert torch.equal(selection.chosen, IDS)
    assert selection.live_choice is None
    values.sum().backward()
    assert torch.equal(live.grad, torch.zeros(4, 6).scatter(-1, IDS, 1.0))  # the router goes on learning


@pytest.mark.parametrize(
    ("shape", "choose"),
    [
        ((4, 6), lambda scores: torch.topk(scores, 3)),
        ((4, 5), lambda scores: torch.topk(scores, 2)),
        ((4, 7), lambda scores: torch.topk(scores, 2)),
        ((6, 6), lambda scores: torch.topk(scores, 2, 0)),
        ((6, 6), lambda scores: torch.topk(scores, k=2, dim=0)),
        ((6, 4), lambda scores: torch.topk(scores, 2, 0)),
        ((4, 6), lambda scores: torch.sort(scores, descending=True)),
    ],
)
def test_another_operation_is_not_the_choice(shape: tuple[int, int], choose: Callable[[Tensor], Any]) -> None:
    live = scores(*shape)
    expected = choose(live)
    with Selection(router(), torch.zeros(shape[0], 2, dtype=torch.long), None, compare=True) as selection:
        values, indices = choose(live)
    assert torch.equal(indices, expected[1])
    assert torch.equal(values, expected[0])
    assert selection.chosen is None


def test_scores_may_have_a_batch_dimension() -> None:
    live = scores(2, 2, 6)
    with Selection(router(), IDS, LIVE_ROWS, compare=False) as selection:
        values, indices = torch.topk(live, 2)
    expected = mixed(IDS, live.detach().reshape(4, 6).topk(2)[1])
    assert torch.equal(indices, expected.reshape(2, 2, 2))
    assert torch.equal(values, live.gather(-1, indices))
    assert torch.equal(selection.chosen, expected)


@pytest.mark.parametrize(("live_T1", "compare"), [(None, True), (LIVE_ROWS, False), (LIVE_ROWS, True)])
def test_the_live_choice_is_kept_and_used_where_a_row_is_missing(live_T1: Tensor | None, compare: bool) -> None:
    live = scores(4, 6)
    best = live.detach().topk(2)[1]
    with Selection(router(), IDS, live_T1, compare) as selection:
        values, indices = torch.topk(live, 2)
    assert torch.equal(indices, IDS if live_T1 is None else mixed(IDS, best))
    assert torch.equal(selection.chosen, indices)
    assert torch.equal(selection.live_choice, best)
    assert torch.equal(values, live.gather(-1, indices))


def test_without_recorded_ids_the_router_chooses_and_its_choice_is_noted() -> None:
    live = scores(2, 2, 6)
    with Selection(router(), None, None, compare=False) as selection:
        values, indices = torch.topk(live, 2)
    assert torch.equal(indices, live.topk(2)[1])
    assert torch.equal(selection.chosen, indices.reshape(4, 2))
    assert torch.equal(selection.live_choice, indices.reshape(4, 2))
    assert values.requires_grad


def test_a_comparison_leaves_nothing_in_the_graph() -> None:
    best = torch.tensor([[1, 2]])

    def choose(with_graph: list[bool]) -> tuple[None, Tensor]:
        with_graph.append(torch.is_grad_enabled())
        return None, best

    seen: list[bool] = []
    selection = Selection(router(), IDS, None, compare=True)
    assert selection.live_indices(choose, [seen], {}) is best
    assert seen == [False]
    assert Selection(router(), IDS, None, compare=False).live_indices(choose, [seen], {}) is None
    assert seen == [False]  # what nobody wants to know is not computed


@pytest.mark.parametrize("tokens", [3, 5])
def test_routes_of_another_number_of_tokens_are_refused_with_the_layer(tokens: int) -> None:
    with (
        pytest.raises(ReplayError, match=f"layer 3: the router got {tokens} tokens, the routes have 4 rows"),
        Selection(router(), IDS, None, compare=False),
    ):
        torch.topk(scores(tokens, 6), 2)


# -- groups first ---------------------------------------------------------------------------------


def choose_by_groups(live: Tensor, groups: int, kept: int, top_k: int) -> tuple[Tensor, Tensor]:
    """deepseek_v3's lines: the best two of each group, the best groups, the best experts of those."""
    tokens, experts = live.shape
    of_group = live.view(tokens, groups, -1).topk(2, dim=-1)[0].sum(-1)
    chosen_groups = torch.topk(of_group, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(of_group).scatter(1, chosen_groups, 1.0)
    mask = mask.unsqueeze(-1).expand(tokens, groups, experts // groups).reshape(tokens, -1)
    return torch.topk(live.masked_fill(~mask.bool(), 0.0), k=top_k, dim=-1, sorted=False)


@pytest.mark.parametrize("kept", [1, 2, 3])  # fewer groups than slots, as many, more
@pytest.mark.parametrize("live_T1", [None, LIVE_ROWS])
@pytest.mark.parametrize("compare", [False, True])
def test_the_groups_of_the_recorded_experts_are_open_and_missing_rows_keep_their_own(
    kept: int, live_T1: Tensor | None, compare: bool
) -> None:
    recorded = torch.tensor([[15, 0], [1, 2], [4, 11], [0, 1]])
    live = scores(4, 16)  # groups of four, as many as there are groups: only the dimensions tell them apart
    alone = choose_by_groups(live, 4, kept, 2)[1]
    with GroupedSelection(router(16, 2, 4), recorded, live_T1, compare) as selection:
        values, indices = choose_by_groups(live, 4, kept, 2)
    expected = recorded if live_T1 is None else mixed(recorded, alone)
    assert torch.equal(indices.sort(-1)[0], expected.sort(-1)[0])
    assert torch.equal(values, live.gather(-1, indices))  # none was masked away
    assert torch.equal(selection.chosen, indices)


def test_the_scores_of_groups_are_those_of_the_groups_that_are_given() -> None:
    of_group = scores(4, 4)
    with GroupedSelection(router(16, 2, 4), torch.tensor([[15, 0], [1, 2], [4, 11], [0, 1]]), None, compare=False):
        values, groups = torch.topk(of_group, 2)
    assert groups.tolist() == [[3, 0], [0, 0], [1, 2], [0, 0]]
    assert torch.equal(values, of_group.gather(1, groups))


def test_groups_are_chosen_live_where_nothing_was_recorded() -> None:
    live = scores(4, 16)
    with GroupedSelection(router(16, 2, 4), None, None, compare=False) as selection:
        indices = choose_by_groups(live, 4, 2, 2)[1]
    assert torch.equal(indices, choose_by_groups(live, 4, 2, 2)[1])
    assert torch.equal(selection.chosen, indices)


def test_a_topk_of_another_width_is_no_choice_of_groups() -> None:
    live = scores(4, 5)
    with GroupedSelection(router(16, 2, 4), torch.zeros(4, 2, dtype=torch.long), None, compare=False) as selection:
        assert torch.equal(torch.topk(live, 2)[1], live.topk(2)[1])
    assert selection.chosen is None


# -- one argmax per slot --------------------------------------------------------------------------


def two_by_argmax(live: Tensor) -> tuple[Tensor, Tensor]:
    """nllb_moe's lines: the best, then the best of the rest."""
    first = torch.argmax(live, dim=-1)
    rest = live.masked_fill(torch.nn.functional.one_hot(first, live.shape[-1]).bool(), -1.0)
    return first, torch.argmax(rest, dim=-1)


@pytest.mark.parametrize(("live_T1", "compare"), [(None, False), (None, True), (LIVE_ROWS, False)])
def test_every_slot_has_its_own_argmax(live_T1: Tensor | None, compare: bool) -> None:
    live = scores(4, 6)
    with ArgmaxSelection(router(), IDS, live_T1, compare) as selection:
        first, second = two_by_argmax(live)
        third = torch.argmax(live, dim=-1)  # not a choice any more
    chosen = torch.stack([first, second], -1)
    expected_first = IDS[:, 0] if live_T1 is None else mixed(IDS[:, :1], live.argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(first, expected_first)
    assert torch.equal(second[~LIVE_ROWS[:, 0]], IDS[~LIVE_ROWS[:, 0], 1])
    assert torch.equal(selection.chosen, chosen)
    assert torch.equal(third, live.argmax(-1))
    if live_T1 is None and not compare:
        assert selection.live_choice is None
    else:
        assert torch.equal(selection.live_choice[:, 0], live.argmax(-1))


def test_argmax_without_recorded_ids_is_the_routers_own() -> None:
    live = scores(4, 6)
    with ArgmaxSelection(router(), None, None, compare=False) as selection:
        first, second = two_by_argmax(live)
    assert torch.equal(selection.chosen, live.topk(2)[1])
    assert torch.equal(selection.live_choice, torch.stack([first, second], -1))


def test_a_max_after_the_only_argmax_is_the_score_of_the_recorded_expert() -> None:
    recorded, live = IDS[:, :1], scores(2, 2, 6)
    with ArgmaxSelection(router(top_k=1), recorded, None, compare=False):
        before = torch.max(live, dim=-1).indices
        chosen = torch.argmax(live, dim=-1)
        values, indices = torch.max(live, dim=-1)
        other = torch.max(live[..., :5], dim=-1).indices
        highest = torch.max(torch.tensor(3.0), torch.tensor(4.0))
    assert torch.equal(before, live.argmax(-1))
    assert torch.equal(chosen.reshape(4, 1), recorded)
    assert torch.equal(indices, chosen)
    assert torch.equal(values, live.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
    assert torch.equal(other, live[..., :5].argmax(-1))
    assert highest == 4.0


def test_a_max_of_a_router_with_two_slots_is_left_alone() -> None:
    live = scores(4, 6)
    with ArgmaxSelection(router(), IDS, None, compare=False):
        two_by_argmax(live)
        assert torch.equal(torch.max(live, dim=-1).indices, live.argmax(-1))
        assert torch.equal(torch.argmax(live[:, :5], dim=-1), live[:, :5].argmax(-1))


# -- phimoe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("live_T1", [None, LIVE_ROWS])
def test_every_slot_of_the_sparse_mixer_gets_its_recorded_expert(
    training: bool, keepdim: bool, live_T1: Tensor | None
) -> None:
    live = scores(4, 6)
    best = live.argmax(-1, keepdim=True)
    mixer = router(training=training, router_jitter_noise=0.01)
    answers = []
    with SparseMixerSelection(mixer, IDS, live_T1, compare=True) as selection:
        for _ in range(2):
            answers.append([torch.max(live, dim=-1, keepdim=keepdim)[1] for _ in range(3 if training else 1)])
        after = torch.max(live, dim=-1, keepdim=True)[1]
        narrow = torch.max(live[:, :5], dim=-1)[1]
    for slot, asked in enumerate(answers):
        expected = IDS[:, slot : slot + 1] if live_T1 is None else mixed(IDS[:, slot : slot + 1], best)
        for answer in asked[:2]:
            assert torch.equal(answer.reshape(4, 1), expected)
        if training:
            assert torch.equal(asked[2].reshape(4, 1), best)  # the best gate for its gradient estimate
        assert torch.equal(selection.chosen[:, slot : slot + 1], expected)
    assert answers[0][0].ndim == (2 if keepdim else 1)
    assert torch.equal(selection.live_choice, best.expand(4, 2))
    assert torch.equal(after, best)
    assert torch.equal(narrow, live[:, :5].argmax(-1))


def test_the_sparse_mixer_chooses_for_itself_where_nothing_was_recorded() -> None:
    live = scores(4, 6)
    with SparseMixerSelection(router(top_k=1, router_jitter_noise=0.01), None, None, compare=False) as selection:
        values, indices = torch.max(live, dim=-1, keepdim=True)
    assert torch.equal(values, live.max(-1, keepdim=True)[0])
    assert torch.equal(selection.chosen, indices)
    assert torch.equal(selection.live_choice, live.argmax(-1, keepdim=True))


@pytest.mark.parametrize("training", [False, True])
def test_the_threshold_is_the_recorded_score_only_where_the_live_one_would_mask_it(training: bool) -> None:
    """Masked where (best - score) / max(|score|, best) is above twice the jitter of 0.125."""
    live = torch.tensor([[1.0, 0.5], [1.0, 0.75], [1.0, 0.8125], [1.0, -4.0], [-2.0, -4.0], [-3.5, -4.0]])
    recorded = torch.ones(6, 1, dtype=torch.long)
    mixer = router(2, 1, training=training, router_jitter_noise=0.125)
    with SparseMixerSelection(mixer, recorded, None, compare=False):
        thresholds = torch.max(live, dim=-1, keepdim=True)[0]
        choice = torch.max(live, dim=-1, keepdim=True)[0] if training else None
    assert thresholds[:, 0].tolist() == [0.5, 1.0, 1.0, -4.0, -4.0, -3.5]
    if choice is not None:
        assert torch.equal(choice[:, 0], live[:, 0])  # the second call asks for the choice alone


# -- doge -----------------------------------------------------------------------------------------


def choose_by_keys(halves: Tensor, keys: int, top_k: int) -> tuple[Tensor, Tensor]:
    """doge's lines: [2, T, N] scores of both halves; returns the scores and the ids of the experts."""
    (scores_x, scores_y), (keys_x, keys_y) = halves.topk(keys, dim=-1)
    pairs = (scores_x.unsqueeze(-1) + scores_y.unsqueeze(-2)).flatten(-2)
    experts = (keys_x.unsqueeze(-1) * keys + keys_y.unsqueeze(-2)).flatten(-2)
    values, positions = pairs.topk(top_k, dim=-1)
    return values, experts.gather(-1, positions)


@pytest.mark.parametrize(("live_T1", "compare"), [(None, False), (None, True), (LIVE_ROWS, False)])
def test_pairs_of_keys_are_found_at_their_ranks(live_T1: Tensor | None, compare: bool) -> None:
    recorded = torch.tensor([[8, 0], [1, 5], [4, 3], [6, 7]])
    halves = scores(2, 4, 3)
    best = choose_by_keys(halves, 3, 2)[1]
    with ProductKeySelection(router(9, 2, num_keys=3), recorded, live_T1, compare) as selection:
        values, experts = choose_by_keys(halves, 3, 2)
        assert torch.equal(torch.topk(halves, 2)[1], halves.topk(2)[1])  # both were asked: not the choice
    expected = recorded if live_T1 is None else mixed(recorded, best)
    assert torch.equal(experts, expected)
    assert torch.equal(selection.chosen, expected)
    sums = halves[0].gather(-1, expected // 3) + halves[1].gather(-1, expected % 3)
    assert torch.allclose(values, sums)
    if live_T1 is None and not compare:
        assert selection.live_choice is None
    else:
        assert torch.equal(selection.live_choice, best)


def test_pairs_are_chosen_live_where_nothing_was_recorded_and_noted_as_experts() -> None:
    halves = scores(2, 4, 3)
    with ProductKeySelection(router(9, 2, num_keys=3), None, None, compare=False) as selection:
        values, experts = choose_by_keys(halves, 3, 2)
        assert torch.equal(torch.max(halves, dim=-1)[1], halves.argmax(-1))
    assert torch.equal(values, choose_by_keys(halves, 3, 2)[0])
    assert torch.equal(selection.chosen, experts)
    assert torch.equal(selection.live_choice, experts)


def test_pairs_that_come_before_their_halves_are_no_choice() -> None:
    pairs = scores(4, 9)
    with ProductKeySelection(router(9, 2, num_keys=3), IDS, None, compare=False) as selection:
        assert torch.equal(torch.topk(pairs, 2)[1], pairs.topk(2)[1])
    assert selection.chosen is None
