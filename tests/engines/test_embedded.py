"""What the embedded engine promises beyond the contract of all engines.

Where a test acts in the middle of a generation it does so behind an exact pass: a `Gate` holds the engine's thread
there until the command that is tested waits in line.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from router_replay import RouterReplay, Sample, Trajectory, logprobs, pack
from router_replay.engines import Completion, Engine, Request, Sampling
from router_replay.engines.embedded import EmbeddedEngine
from router_replay.engines.embedded_sampling import draw
from router_replay.errors import EngineError
from router_replay.routes import Routes
from tests.engines.conftest import GREEDY, VOCABULARY, Checkpoints, Trainer, one, prompt, same
from tests.makers import random_routes
from tests.replay.tiny import make

SEEDED = Sampling(max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_a(checkpoints: Checkpoints) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoints.a)


@pytest.fixture
def engine(model_a: Any, checkpoints: Checkpoints) -> Iterator[EmbeddedEngine]:
    """Version 3 of weights A; the module's model is given back with A's weights."""
    kept = {name: tensor.clone() for name, tensor in model_a.state_dict().items()}
    with EmbeddedEngine(model_a, version=3) as engine:
        yield engine
    model_a.load_state_dict(kept)


class Gate:
    """Stops the engine behind pass number `passes` (0 is the next one) until `then` has put a command in line."""

    def __init__(self, engine: EmbeddedEngine, passes: int) -> None:
        self.engine, self.left = engine, passes
        self.reached, self.opened = threading.Event(), threading.Event()
        self.hook = engine._model.register_forward_hook(self._after)

    def _after(self, *_: Any) -> None:
        if self.left == 0:
            self.reached.set()
            assert self.opened.wait(20)
        self.left -= 1

    def then(self, *commands: Callable[[], Any]) -> list[concurrent.futures.Future[Any]]:
        assert self.reached.wait(20)
        futures = []
        for command in commands:
            waiting = len(self.engine._commands)
            futures.append(in_thread(command))
            while len(self.engine._commands) == waiting and not futures[-1].done():
                time.sleep(0.001)
        self.hook.remove()
        self.opened.set()
        return futures


def in_thread(command: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(command())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def landed(future: concurrent.futures.Future[Any]) -> Any:
    return future.result(timeout=20)


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


def test_a_bad_request_is_refused_before_any_of_its_batch_joins(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Request((VOCABULARY,), GREEDY)
    posted: list[object] = []
    monkeypatch.setattr(engine, "_post", posted.append)
    with pytest.raises(EngineError, match=rf"{bad.id}: token ids must lie in"):
        engine.generate([Request(prompt(), GREEDY), bad])
    assert not posted


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
        forced = one(engine, Request(prompt(), GREEDY, forced_routes=given, routes_start=10))
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
        answer = one(engine, Request(history, Sampling(6, seed=turn, ignore_eos=True), routes_start=start))
        trajectory.append(history, answer.token_ids, answer.logprobs, answer.routes, answer.start)
        history = (*history, *answer.token_ids.tolist(), 7, 8, 9)
    assert len(trajectory) == 9 + 3 * 6 + 2 * 3
    assert trajectory.routes[:-1].all_captured
    whole = one(engine, Request(trajectory.token_ids.tolist(), Sampling(1)))
    assert agreeing(whole.routes.ids[:-1], trajectory.routes.ids[:-1]) > 0.99


# -- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["keep", "abort", "wait"])
def test_a_swap_in_the_middle_is_exact(engine: EmbeddedEngine, checkpoints: Checkpoints, in_flight: Any) -> None:
    before = one(engine, Request(prompt(), GREEDY))
    other = AutoModelForCausalLM.from_pretrained(checkpoints.b)
    gate = Gate(engine, 4)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    update, late = gate.then(
        lambda: engine.update_weights(other, 4, in_flight), lambda: one(engine, Request(prompt(1), GREEDY))
    )
    landed(update)
    completion = landed(running)
    tokens, old = {"keep": (20, 5), "abort": (5, 5), "wait": (20, 20)}[in_flight]
    assert len(completion.token_ids) == tokens
    assert completion.versions.tolist() == [3] * old + [4] * (tokens - old)
    assert completion.routes.versions.tolist() == [3] * (len(prompt()) - 1 + old) + [4] * (tokens - old)
    assert np.array_equal(completion.logprobs[:old], before.logprobs[:old])
    rows = len(prompt()) - 1 + old
    assert completion.routes[:rows].same_sets(before.routes[:rows])
    assert set(landed(late).versions) == {4}  # came after the swap was asked for
    with EmbeddedEngine(checkpoints.b) as fresh:
        assert same(one(engine, Request(prompt(), GREEDY)), one(fresh, Request(prompt(), GREEDY)))
    if in_flight == "keep":  # the first token after the swap is of B's weights over A's keys, neither one's alone
        assert abs(completion.logprobs[old] - before.logprobs[old]) > 1e-3


@pytest.mark.parametrize("kind", ["folder", "state dict", "module"])
def test_the_same_weights_change_no_bit(
    engine: EmbeddedEngine, model_a: Any, checkpoints: Checkpoints, kind: str
) -> None:
    before = one(engine, Request(prompt(), SEEDED))
    again = AutoModelForCausalLM.from_pretrained(checkpoints.a)
    source = {"folder": checkpoints.a, "state dict": again.state_dict(), "module": again}[kind]
    with torch.no_grad():
        model_a.model.layers[1].mlp.gate.e_score_correction_bias.add_(1.0)  # so that doing nothing would show
        model_a.lm_head.weight.mul_(1.5)
    engine.update_weights(source, 4)
    assert same(one(engine, Request(prompt(), SEEDED)), before)
    assert engine.version == 4


def without(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if "layers.2.mlp.gate.weight" not in name}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (without, r"missing .*layers\.2\.mlp\.gate\.weight"),
    "unexpected": (lambda state: {**state, "extra.weight": torch.zeros(1)}, r"unexpected extra\.weight"),
    "shape": (lambda state: {**state, "lm_head.weight": torch.zeros(3, 64)}, r"lm_head\.weight|MISMATCH|mismatch"),
}


@pytest.mark.parametrize("from_folder", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_fit_are_refused_and_touch_nothing(
    engine: EmbeddedEngine,
    model_a: Any,
    checkpoints: Checkpoints,
    tmp_path: pathlib.Path,
    wrong: str,
    from_folder: bool,
) -> None:
    spoil, message = WRONG[wrong]
    source: Any = spoil(model_a.state_dict())
    if from_folder:
        save_file(
            spoil(load_file(f"{checkpoints.b}/model.safetensors")), tmp_path / "model.safetensors", {"format": "pt"}
        )
        source = tmp_path
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    [update] = gate.then(lambda: engine.update_weights(source, 4, "abort"))
    with pytest.raises(EngineError, match=message):
        landed(update)
    assert landed(running).finish_reason == "length"
    assert engine.version == 3
    assert same(one(engine, Request(prompt(), GREEDY)), landed(running))


# -- errors, aborts, the end --------------------------------------------------------------------------


def test_an_error_in_a_pass_fails_its_requests_and_no_others(engine: EmbeddedEngine, model_a: Any) -> None:
    before = one(engine, Request(prompt(), SEEDED))

    def fails(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["past_key_values"].get_seq_length() >= len(prompt()) + 3:
            raise RuntimeError("a fuse blew")

    hook = model_a.register_forward_pre_hook(fails, with_kwargs=True)
    results = [in_thread(lambda seed=seed: one(engine, Request(prompt(seed), SEEDED))) for seed in range(2)]
    for result in results:
        with pytest.raises(EngineError, match="the model failed in a pass: RuntimeError: a fuse blew"):
            landed(result)
    hook.remove()
    assert same(one(engine, Request(prompt(), SEEDED)), before)


def test_logits_that_are_no_numbers_fail_the_request(engine: EmbeddedEngine, model_a: Any) -> None:
    before = one(engine, Request(prompt(), SEEDED))
    spoiled = {name: tensor.clone() for name, tensor in model_a.state_dict().items()}
    good = {name: tensor.clone() for name, tensor in spoiled.items()}
    spoiled["model.embed_tokens.weight"][120] = float("nan")
    engine.update_weights(spoiled, 4)
    clean = tuple(token % 100 for token in prompt())
    bad = in_thread(lambda: one(engine, Request((*clean[:-1], 120), SEEDED)))
    fine = in_thread(lambda: one(engine, Request(clean, Sampling(2, 0.0, ignore_eos=True))))
    with pytest.raises(EngineError, match="logits of position 70 are not finite"):
        landed(bad)
    assert np.isfinite(landed(fine).logprobs).all()
    engine.update_weights(good, 5)
    assert same(one(engine, Request(prompt(), SEEDED)), before)


def test_an_abort_names_who_is_unknown_and_forgives_who_is_through(engine: EmbeddedEngine) -> None:
    request = Request(prompt(), GREEDY)
    one(engine, request)
    assert engine.abort([request.id]) == []
    with pytest.raises(EngineError, match="called nobody: nothing was aborted"):
        engine.abort([request.id, "nobody"])


def test_who_stops_waiting_frees_its_place(engine: EmbeddedEngine) -> None:
    async def work() -> None:
        task = asyncio.create_task(engine.submit(Request(prompt(), Sampling(400, ignore_eos=True))))
        while not engine._schedule._runner.samples:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    schedule = engine._schedule
    engine._post(lambda: None).result()  # the turn that runs this ends with a look at who is not waited for
    assert engine._post(lambda: (list(schedule._flights), schedule._runner.samples)).result() == ([], [])


def test_a_pause_waits_for_those_in_flight_and_holds_those_after(engine: EmbeddedEngine) -> None:
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    pause, late = gate.then(lambda: engine.pause("wait"), lambda: one(engine, Request(prompt(1), GREEDY)))
    landed(pause)
    assert landed(running).finish_reason == "length"
    with pytest.raises(EngineError, match="a paused engine finishes nothing"):
        engine.pause("wait")
    assert not late.done()
    engine.resume()
    assert landed(late).finish_reason == "length"


def test_a_closed_engine_answers_nobody_and_leaves_the_model(model_a: Any) -> None:
    engine = EmbeddedEngine(model_a)
    gate = Gate(engine, 2)
    running = in_thread(lambda: one(engine, Request(prompt(), GREEDY)))
    [closing] = gate.then(lambda: (gate.opened.set(), engine.close()))
    landed(closing)
    with pytest.raises(EngineError, match="this engine was closed"):
        landed(running)
    assert not engine._thread.is_alive()
    for call in (engine.abort, engine.pause, lambda: one(engine, Request(prompt()))):
        with pytest.raises(EngineError, match="this engine was closed"):
            call()
    engine.close()
    RouterReplay(model_a).detach()  # would refuse routers that still belong to another


def test_the_length_of_the_model_is_the_end(model_a: Any) -> None:
    with EmbeddedEngine(model_a, max_length=75) as engine:
        completion = one(engine, Request(prompt(), GREEDY))
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
        with pytest.raises(EngineError, match="a prompt of 80 tokens leaves no room in 75"):
            one(engine, Request(prompt(0, 80)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((5, VOCABULARY)), r"token ids must lie in \[0, 128\), got 5 to 128"),
        (Request((5,), Sampling(temperature=-1.0)), "temperature must be at least 0"),
        (Request((5,), Sampling(top_p=0.0)), "top_p must lie in"),
    ],
)
def test_what_would_break_a_pass_is_refused_before(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        one(engine, request_)


def test_models_that_do_not_generate_are_refused() -> None:
    for family in ("switch_transformers", "qwen3_vl_moe"):
        with pytest.raises(EngineError, match="it cannot generate"):
            EmbeddedEngine(make(family).model)
