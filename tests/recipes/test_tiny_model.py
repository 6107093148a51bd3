"""The models of `router-replay make-model`: a small recipe is made for real, and the ready model is held to its own."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from router_replay import RouterSpec
from router_replay.cli import make_model as command
from router_replay.errors import ConfigError, TrainError
from router_replay.recipes.tiny import model as tiny_model
from router_replay.recipes.tiny.data import Examples, examples_of
from router_replay.recipes.tiny.model import CHARACTERS, RECIPES, Recipe, make_config, make_tokenizer, read_stamp
from router_replay.recipes.tiny.warm_start import Progress, WarmStart, make_from_recipe, make_model
from router_replay.rl.config import EnvironmentConfig, tiny_folder
from router_replay.rl.environments import make_task
from router_replay.rl.policy.models import load_tokenizer, model_folder

READY = tiny_folder()
RECIPE_FOLDER = pathlib.Path(tiny_model.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
NEVER = 2.0
SMALL = Recipe(
    layers=2, width=32, heads=2, key_value_heads=1, experts=8, top_k=2, expert_width=32, steps=6, target=NEVER,
    window=2, warmup=2, additions=12, calculations=4, save_every=2,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more, and threads that wait for each other lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(folder: pathlib.Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The small recipe, made without interruption."""
    return make_from_recipe(tmp_path_factory.mktemp("made") / "small", SMALL)


class Killed(BaseException):
    pass


# -- tokenizer and examples ---------------------------------------------------------------------------


def test_the_tokenizer_has_one_token_per_character_and_comes_back_from_its_folder(made: pathlib.Path) -> None:
    loaded = AutoTokenizer.from_pretrained(made)
    for tokenizer in (make_tokenizer(), loaded):
        token_ids = tokenizer.encode(CHARACTERS)
        assert token_ids == list(range(2, 2 + len(CHARACTERS)))
        assert tokenizer.decode(token_ids) == CHARACTERS
        assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == CHARACTERS
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2 + len(CHARACTERS))


def test_the_tokenizer_refuses_what_it_cannot_give_back() -> None:
    for text in ("a", "1 2", "é", "1\n"):
        with pytest.raises(Exception, match="Missing"):
            make_tokenizer().encode(text)


def texts(examples: Examples, index: int) -> tuple[str, str]:
    """An example, and the same with · for each token that is not the model's own."""
    tokenizer = make_tokenizer()
    row = [token for token in examples.token_ids[index] if token]
    own = examples.own[index]
    assert not own[len(row) :].any()
    shown = [tokenizer.decode([token]).replace("<|end|>", "$") for token in row]
    return "".join(shown), "".join(text if mine else "·" for text, mine in zip(shown, own, strict=False))


def test_only_the_tokens_of_the_policy_bear_loss() -> None:
    additions, calculations = examples_of(RECIPES["tiny"], 0)
    assert (len(additions.token_ids), len(calculations.token_ids)) == (208, 48)
    whole, own = texts(additions, 3)
    a, b = map(int, whole.split("=")[0].split("+"))
    assert whole == f"{a}+{b}={a + b}$"
    assert own == f"······{a + b}$"
    whole, own = texts(calculations, 3)
    a, b, c = map(int, whole.split("?")[0].split("+"))
    assert whole == f"{a}+{b}+{c}?<{a}+{b}>[{a + b}]<{a + b}+{c}>[{a + b + c}]{a + b + c}$"
    seen, last = "·" * len(f"[{a + b}]"), "·" * len(f"[{a + b + c}]")
    assert own == f"·········<{a}+{b}>{seen}<{a + b}+{c}>{last}{a + b + c}$"


def test_what_the_model_is_taught_is_what_the_environments_reward() -> None:
    tokenizer = make_tokenizer()
    additions, _ = examples_of(RECIPES["tiny"], 0)
    task = make_task(EnvironmentConfig(), tokenizer, RECIPES["tiny"].seed)
    environment = task.environment()
    environment.reset((0 + 1) * (1 << 32) + 3)
    assert environment.step(additions.token_ids[3][additions.own[3]].tolist()).reward == 1.0


def test_each_step_has_examples_of_its_own_and_always_the_same() -> None:
    assert np.array_equal(examples_of(SMALL, 1)[0].token_ids, examples_of(SMALL, 1)[0].token_ids)
    assert not np.array_equal(examples_of(SMALL, 1)[0].token_ids, examples_of(SMALL, 2)[0].token_ids)


# -- making -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_off_at", [5, 6])
def test_a_run_that_was_cut_off_ends_with_the_same_weights(
    tmp_path: pathlib.Path, made: pathlib.Path, cut_off_at: int
) -> None:
    folder = tmp_path / "small"

    def kill(now: Progress) -> None:
        if now.step == cut_off_at:
            raise Killed

    with pytest.raises(Killed):
        make_from_recipe(folder, SMALL, progress=kill)
    assert not folder.exists()
    unfinished = tmp_path / "small.unfinished"
    (unfinished / "model").mkdir()  # as if it had been killed while writing
    (unfinished / "model" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (unfinished / "state.new").write_bytes(b"half")
    steps: list[int] = []
    assert make_from_recipe(folder, SMALL, progress=lambda now: steps.append(now.step)) == folder
    assert steps == [5, 6]
    assert weights(folder) == weights(made)
    assert {path.name for path in folder.iterdir()} == {path.name for path in made.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_the_state_of_another_recipe_is_not_gone_on_with(tmp_path: pathlib.Path, made: pathlib.Path) -> None:
    other = WarmStart(dataclasses.replace(SMALL, seed=1))
    other.step()
    (tmp_path / "small.unfinished").mkdir()
    other.save(tmp_path / "small.unfinished" / "state.pt")
    assert weights(make_from_recipe(tmp_path / "small", SMALL)) == weights(made)


def test_a_damaged_state_and_a_full_disk_are_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = WarmStart(SMALL), tmp_path / "state.pt"
    run.save(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(TrainError, match=r"state\.pt cannot be read: it is damaged .*remove it to start over"):
        run.load(file)

    def full(_: object, path: pathlib.Path) -> None:
        path.touch()
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(TrainError, match=r"state\.pt could not be written"):
        run.save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_finished_folder_is_returned_at_once(made: pathlib.Path) -> None:
    def fail(now: Progress) -> None:
        raise AssertionError(f"trained again: {now}")

    assert make_from_recipe(made, SMALL, progress=fail) == made
    saved_elsewhen = dataclasses.replace(SMALL, save_every=99)
    assert make_from_recipe(made, saved_elsewhen, progress=fail) == made


def test_a_folder_of_something_else_is_left_alone(tmp_path: pathlib.Path, made: pathlib.Path) -> None:
    before = weights(made)
    with pytest.raises(ConfigError, match=r"already holds the model of another recipe \([0-9a-f]{12}\): choose"):
        make_from_recipe(made, dataclasses.replace(SMALL, seed=1))
    assert weights(made) == before
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="already holds something else"):
        make_from_recipe(tmp_path, SMALL)
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_seed_decides(tmp_path: pathlib.Path, made: pathlib.Path) -> None:
    torch.manual_seed(5)  # of the caller, which must not matter
    assert weights(make_from_recipe(tmp_path / "same", SMALL)) == weights(made)
    assert weights(make_from_recipe(tmp_path / "other", dataclasses.replace(SMALL, seed=1))) != weights(made)


def test_it_stops_when_it_is_right_often_enough(tmp_path: pathlib.Path) -> None:
    folder = make_from_recipe(tmp_path / "small", dataclasses.replace(SMALL, target=0.0))
    assert read_stamp(folder)["steps_done"] == SMALL.window


def test_two_that_want_the_same_model_make_it_once(tmp_path: pathlib.Path) -> None:
    steps: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        wanted = [
            pool.submit(make_from_recipe, tmp_path / "small", SMALL, None, lambda now: steps.append(now.step))
            for _ in range(2)
        ]
    assert [future.result() for future in wanted] == [tmp_path / "small"] * 2
    assert steps == [1, 2, 3, 4, 5, 6]


def test_what_cannot_be_made_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"size must be one of \['gpu', 'tiny'\], got 'huge'"):
        make_model(tmp_path / "model", "huge")  # type: ignore[arg-type]
    for arguments in ({"steps": 0}, {"digits": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match="must be at least"):
            make_model(tmp_path / "model", **arguments)
    with pytest.raises(ConfigError, match="device must be cpu or cuda, got 'abacus'"):
        make_model(tmp_path / "model", device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="finds no GPU"):
            make_model(tmp_path / "model", device="cuda")


def test_the_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(RECIPES, "tiny", SMALL)
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    out = tmp_path / "small"
    chosen = parser.parse_args(["make-model", "--out", str(out), "--steps", "3", "--device", "cpu"])
    assert chosen.run(chosen) == 0
    assert read_stamp(out)["recipe"] == dataclasses.asdict(dataclasses.replace(SMALL, steps=3))
    assert capsys.readouterr().out.startswith(f"{out}: 3 steps; at temperature 1, ")


# -- the two sizes ------------------------------------------------------------------------------------


def test_the_gpu_size_has_a_few_hundred_million_parameters() -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(make_config(RECIPES["gpu"]))
    assert 300e6 < sum(parameter.numel() for parameter in model.parameters()) < 600e6
    assert RouterSpec.from_config(model.config) == RouterSpec(64, 8, tuple(range(16)))


def test_the_ready_model_is_of_the_recipe_and_small() -> None:
    assert tiny_model.is_made(READY, RECIPES["tiny"]), f"the recipe changed: router-replay make-model --out {READY}"
    assert sum(file.stat().st_size for file in READY.rglob("*")) < 12_000_000


def test_every_file_of_the_ready_model_is_installed_with_the_package() -> None:
    """From a wheel, `model.path = "tiny"` must find the model, not train it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    [pattern] = settings["router_replay.recipes.tiny"]
    assert sorted(RECIPE_FOLDER.glob(pattern)) == sorted(READY.iterdir())
    assert READY.is_relative_to(RECIPE_FOLDER)
    assert model_folder("tiny") == READY
    assert load_tokenizer(READY).decode(load_tokenizer(READY).encode("12+34=")) == "12+34="


def test_the_ready_model_is_right_more_often_than_not_and_still_uncertain() -> None:
    """The probability that a sampled answer to problems of the arithmetic environment is right."""
    model = AutoModelForCausalLM.from_pretrained(READY)
    assert model.dtype == torch.bfloat16
    assert RouterSpec.from_config(model.config) == RouterSpec(56, 8, tuple(range(10)))
    right = {}
    for number, kind in enumerate(("additions", "calculations")):
        examples = examples_of(RECIPES["tiny"], 10**6)[number]
        token_ids, own = torch.from_numpy(examples.token_ids), torch.from_numpy(examples.own)[:, 1:]
        with torch.no_grad():
            logits = model.float()(input_ids=token_ids, attention_mask=(token_ids != 0).long()).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        right[kind] = float(logprobs.masked_fill(~own, 0.0).sum(-1).exp().mean())
    assert 0.5 < right["additions"] < 0.7
    assert right["calculations"] > 0.2
