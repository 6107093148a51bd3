"""The embedded engine's tokens, log-probs and rows are exact: alone, in company, with forced rows, after an abort."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from router_replay import RouterReplay, Sample, Trajectory, logprobs, pack
from router_replay.engines import Completion, Request, Sampling
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.embedded.sampling import draw
from router_replay.routes import Routes
from tests.engines.conftest import GREEDY, Checkpoints, Trainer, one, prompt, same
from tests.engines.embedded.gate import SEEDED, Gate, in_thread, landed
from tests.makers import random_routes
from tests.replay.tiny import make


def recompute(folder: str, prompt_ids: tuple[int, ...], completion: Completion, temperature: float) -> np.ndarray:
    """The trainer's log-probs of the completion, packed, with the captured rows replayed."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = np.concatenate([np.asarray(prompt_ids, np.int64), completion.token_ids])
    rows = Routes.concat([completion.routes, Routes.missing(1, completion.routes.spec)])
    mask = np.arange(len(tokens)) >= len(prompt_ids)
    batch = pack([Sample(tokens, np.zeros(len(tokens), np.float32), mask, rows)], len(tokens))
    with torch.no_grad(), RouterReplay(model).replay(batch):
        return logprobs(model, batch, temperature=temperature).numpy()[len(prompt_ids) - 1 : len(tokens) - 1]


def agreeing(a: np.ndarray, b: np.ndarray) -> float:
    return float((np.sort(a, -1) == np.sort(b, -1)).all(-1).mean())


# -- the numbers --------------------------------------------------------------------------------------


def test_a_trainer_with_the_captured_rows_computes_the_same_logprobs(
    engine: EmbeddedEngine, checkpoints: Checkpoints
) -> None:
    prompts = [prompt(seed, tokens) for seed, tokens in enumerate((7, 30, 1, 30, 18))]
    samplings = [Sampling(8 + 3 * seed, (1.0, 0.6)[seed % 2], 0.9, seed=seed, ignore_eos=True) for seed in range(5)]
    completions = engine.generate([Request(*pair) for pair in zip(prompts, samplings, strict=True)])
    whole = AutoModelForCausalLM.from_pretrained(checkpoints.a).eval()
    replayer = RouterReplay(whole)
    for tokens, sampling, completion in zip(prompts, samplings, completions, strict=True):
        theirs = recompute(checkpoints.a, tokens, completion, sampling.temperature)
        assert np.abs(theirs - completion.logprobs).max() < 1e-4
        with torch.no_grad(), replayer.record() as recorded:
            whole(input_ids=torch.tensor([[*tokens, *completion.token_ids.tolist()]]))
        # One pass over everything rounds otherwise than token by token: a near tie may fall the other way.
        assert agreeing(recorded.routes.ids[: len(completion.routes)], completion.routes.ids) > 0.99


SLIDING = {"mixtral": {}, "gpt_oss": {}}  # a window of four tokens, which every request here leaves
OTHERS = {
    "deepseek_v3": {},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}


@pytest.mark.parametrize("family", [*SLIDING, *OTHERS])
def test_a_request_does_not_depend_on_its_company(family: str) -> None:
    model = make(family, **(SLIDING | OTHERS)[family]).model
    requests = [(prompt(seed, tokens), seed) for seed, tokens in enumerate((3, 9, 5, 9, 12, 1))]

    def made(tokens: tuple[int, ...], seed: int) -> Request:
        ids = tuple(token % 60 + 3 for token in tokens)
        return Request(ids, Sampling(max_tokens=14 - 2 * seed, seed=seed, ignore_eos=True))

    with EmbeddedEngine(model, max_batch=4) as engine:  # fewer than there are: they join as others leave
        assert bool(engine.capabilities.why_not) == (family == "qwen3_next")
        alone = [one(engine, made(*request)) for request in requests]
        together = engine.generate([made(*request) for request in requests])
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
        assert agreeing(a.routes.ids, b.routes.ids) > 0.99


def test_a_seed_decides_the_tokens_of_each_sample(engine: EmbeddedEngine) -> None:
    samples = engine.generate([Request(prompt(), Sampling(max_tokens=12, seed=5, n=3, ignore_eos=True))])
    for sample in samples:
        alone = one(engine, Request(prompt(), Sampling(max_tokens=12, seed=5 + sample.index, ignore_eos=True)))
        assert np.array_equal(alone.token_ids, sample.token_ids)
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 3


def test_a_batch_is_the_same_to_the_bit_whatever_the_threads_do(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of another size round otherwise: all requests must be in the schedule before the first pass."""
    post, delays = engine._post, np.random.default_rng(0)

    def late(command: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        time.sleep(delays.uniform(0, 0.01))  # about a pass of this model
        return post(command)

    def batch() -> list[Completion]:
        lengths = np.random.default_rng(1).integers(1, 12, 20).tolist()
        return engine.generate(
            Request(prompt(seed, tokens), Sampling(4 + seed, seed=seed, ignore_eos=True))
            for seed, tokens in enumerate(lengths)
        )

    monkeypatch.setattr(engine, "_post", late)
    first = batch()
    assert [len(completion.token_ids) for completion in first] == list(range(4, 24))
    for _ in range(4):
        for before, now in zip(first, batch(), strict=True):
            assert np.array_equal(before.token_ids, now.token_ids)
            assert np.array_equal(before.logprobs, now.logprobs)
            assert np.array_equal(before.routes.ids, now.routes.ids)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    draws = 2000
    logits = torch.tensor([0.5, 0.2, 0.05, 0.25]).log().expand(draws, 4) * 2  # temperature 2 gives the logs back
    uniforms = [(number + 0.5) / draws for number in range(draws)]
    tokens, logp, usable = draw(logits, [Sampling(temperature=2.0)] * draws, uniforms)
    assert tokens.bincount(minlength=4).tolist() == [1000, 400, 100, 500]
    assert torch.allclose(logp.exp(), torch.tensor([0.5, 0.2, 0.05, 0.25])[tokens])
    tokens, cut, _ = draw(logits, [Sampling(temperature=2.0, top_p=0.7)] * draws, uniforms)
    assert tokens.bincount(minlength=4).tolist() == [1333, 0, 0, 667]  # 0.5 alone does not reach 0.7
    assert torch.allclose(cut.exp(), torch.tensor([0.5, 0.2, 0.05, 0.25])[tokens])  # as before top-p
    tokens, greedy, _ = draw(logits, [Sampling(temperature=0.0)] * draws, uniforms)
    assert set(tokens.tolist()) == {0}
    assert torch.allclose(greedy, logits.log_softmax(-1)[:, 0])
    assert usable.all()
    logits = logits.clone()
    logits[3, 1], logits[4, 2], logits[5] = float("nan"), float("inf"), -float("inf")
    usable = draw(logits, [Sampling()] * draws, uniforms)[2]
    assert torch.nonzero(~usable)[:, 0].tolist() == [3, 4, 5]


# -- forced rows, and going on ------------------------------------------------------------------------


def test_forced_rows_come_back_exactly_and_change_the_logprobs(engine: EmbeddedEngine) -> None:
    free = one(engine, Request(prompt(), GREEDY))
    foreign = random_routes(50, engine.spec, seed=1)
    for given, version in ((foreign, 3), (foreign.with_versions(1), 1)):
        forced = one(engine, Request(prompt(), GREEDY, forced_routes=given, start=10))
        assert np.array_equal(forced.routes.ids[:40], foreign.ids[10:])
        assert forced.routes.versions.tolist() == [version] * 40 + [3] * (len(forced.routes) - 40)
        assert abs(forced.logprobs[0] - free.logprobs[0]) > 1e-3
    nothing = Routes(foreign.ids, engine.spec, captured=np.zeros(50, bool))
    assert same(one(engine, Request(prompt(), GREEDY, forced_routes=nothing)), free)


def aborted_behind(engine: EmbeddedEngine, request: Request, passes: int) -> Completion:
    gate = Gate(engine, passes)
    running = in_thread(lambda: one(engine, request))
    [abort] = gate.then(lambda: engine.abort([request.id]))
    assert landed(abort)[0] is landed(running)
    return landed(running)


def test_an_aborted_request_goes_on_as_if_nothing_had_happened(engine: EmbeddedEngine) -> None:
    whole = one(engine, Request(prompt(), GREEDY))
    part = aborted_behind(engine, Request(prompt(), GREEDY), passes=7)
    assert (len(part.token_ids), part.finish_reason) == (8, "abort")
    assert part.routes.same_sets(whole.routes[: len(part.routes)])
    history = (*prompt(), *part.token_ids.tolist())
    rest = one(engine, Request(history, Sampling(12, 0.0, ignore_eos=True), forced_routes=part.routes))
    assert [*part.token_ids, *rest.token_ids] == whole.token_ids.tolist()
    assert rest.routes[: len(part.routes)] == part.routes
    assert rest.routes.same_sets(whole.routes)
    assert np.abs(rest.logprobs - whole.logprobs[8:]).max() < 1e-4


def test_what_goes_on_with_other_weights_is_what_a_trainer_replays(
    engine: EmbeddedEngine, checkpoints: Checkpoints, trainer: Trainer
) -> None:
    part = aborted_behind(engine, Request(prompt(), SEEDED), passes=5)
    engine.update_weights(checkpoints.b, 4)
    history = (*prompt(), *part.token_ids.tolist())
    rest = one(engine, Request(history, SEEDED, forced_routes=part.routes))
    assert rest.routes[: len(part.routes)] == part.routes  # versions too: 3, who routed them first
    assert set(rest.routes.versions[len(part.routes) :]) == set(rest.versions) == {4}
    assert trainer.gap(checkpoints.b, history, rest, rest.routes).max() < 1e-4


def test_three_turns_become_a_trajectory(engine: EmbeddedEngine) -> None:
    trajectory = Trajectory(engine.spec)
    history: tuple[int, ...] = prompt(0, 9)
    for turn in range(3):
        start = trajectory.next_start
        answer = one(engine, Request(history, Sampling(6, seed=turn, ignore_eos=True), start=start))
        trajectory.append(history, answer.token_ids, answer.logprobs, answer.routes, answer.start)
        history = (*history, *answer.token_ids.tolist(), 7, 8, 9)
    assert len(trajectory) == 9 + 3 * 6 + 2 * 3
    assert trajectory.routes[:-1].all_captured
    whole = one(engine, Request(trajectory.token_ids.tolist(), Sampling(1)))
    assert agreeing(whole.routes.ids[:-1], trajectory.routes.ids[:-1]) > 0.99
