"""`environment.kind = "module:Class"`: an environment of one's own is found, made, checked and trained on."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from examples.guess_environment import GuessTask
from router_replay.cli import main
from router_replay.errors import ConfigError
from router_replay.recipes.tiny.model import make_tokenizer
from router_replay.rl.config import EnvironmentConfig, TrainConfig, check_config, load_config
from router_replay.rl.environments import Task, Turn, make_task
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths
from router_replay.run_files import read_metrics

ROOT = pathlib.Path(__file__).parents[3]
TOKENIZER = make_tokenizer()
GAMES = """
from router_replay.rl.environments import Task, Turn

class Game(Task):
    def __init__(self, tokenizer, seed, *, size=3):
        self.seed, self.size = seed, size
        if size < 1:
            raise ValueError("size must be positive")
    def environment(self):
        return self
    def reset(self, problem):
        return [5]
    def step(self, token_ids):
        return Turn(1.0)

class Short(Game):
    max_turns = 2

class Leaves(Game):
    def __init__(self, tokenizer, seed):
        raise SystemExit(0)

class Bare:
    def __init__(self, tokenizer, seed): ...
    def environment(self): ...

class Property(Game):
    @property
    def max_turns(self):
        return 3

class Unmeasured(Game):
    def prompt_lengths(self):
        return 1 / 0

not_a_class = 3
"""


@pytest.fixture
def games(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of this name in the current folder, which is not on the Python path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_games.py").write_text(GAMES)
    yield "my_games"
    sys.modules.pop("my_games", None)


def task_of(kind: str, **arguments: Any) -> Task:
    return make_task(EnvironmentConfig(kind=kind, arguments=arguments), TOKENIZER, seed=7)


def test_a_class_of_the_current_folder_is_made_with_its_arguments(games: str) -> None:
    task: Any = task_of(f"{games}:Game", size=5)
    assert (task.seed, task.size) == (7, 5)
    assert (task.stop_token_ids, task.problems, task.max_turns) == ((), None, None)
    assert task.digest == "problems of my_games.Game"
    assert list(task.prompt_lengths()) == []
    assert str(pathlib.Path.cwd()) not in sys.path


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("absent_module:Game", {}, "environment.kind = .*cannot be imported: ModuleNotFoundError"),
        ("my_games:Absent", {}, "expected a class, but in .*my_games.py it does not exist"),
        ("my_games:not_a_class", {}, "expected a class, but in .* it is 3"),
        ("my_games:Game", {"sise": 2}, r"Game\(tokenizer, seed=7, sise=2\) raised TypeError: .*'sise'"),
        ("my_games:Game", {"size": 0}, "raised ValueError: size must be positive"),
        ("my_games:Leaves", {}, "raised SystemExit: 0"),
        ("my_games:Bare", {}, "Bare lacks stop_token_ids, problems, max_turns, digest, prompt_lengths; derive it from"),
        ("my_games:Property", {}, "max_turns must be set on the class, as a whole number above 0 or None"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_the_start(
    games: str, kind: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of(kind, **arguments)


def test_prompt_lengths_that_raise_are_named(games: str) -> None:
    task = task_of(f"{games}:Unmeasured")
    with pytest.raises(ConfigError, match=r"Unmeasured\.prompt_lengths raised ZeroDivisionError"):
        check_prompt_lengths(task, TrainConfig())


@pytest.mark.parametrize(("name", "longest"), [("Game", 3 * 8), ("Short", 3 * 2)])
def test_the_longest_response_follows_the_turns_of_the_class(games: str, name: str, longest: int) -> None:
    """Dr. GRPO divides by it."""
    config = load_config(None, [f"environment.kind={games}:{name}", "rollout.max_tokens=3", "rollout.max_turns=8"])
    assert config.longest_response == longest


@pytest.mark.parametrize("kind", ["chess", ":Game", "games:"])
def test_a_kind_is_a_short_name_or_a_class(kind: str) -> None:
    names = "'arithmetic', 'calculator', 'jsonl', 'agent'"
    message = f'environment.kind: expected {names} or "module:Class" .*, got "{kind}"'
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"environment.kind={kind}"])


def test_arguments_that_nothing_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'environment\.arguments with environment\.kind = "arithmetic"'):
        check_config(load_config(None, ["environment.arguments.size=3"]), world_size=1)
    with pytest.raises(ConfigError, match=r"api_key is refused here, because settings are written to config\.json"):
        load_config(None, ["environment.kind=games:Game", "environment.arguments.api_key=secret"])


# -- the example -------------------------------------------------------------------------------------


def tokens(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]


def test_the_bounds_of_the_guessing_game_narrow_until_the_number_is_found() -> None:
    environment = GuessTask(TOKENIZER, 0, lowest=10, highest=60).environment()
    assert TOKENIZER.decode(environment.reset(3)) == "10+60="
    low, high, turns = 10, 60, 0
    while True:
        guess = (low + high) // 2
        turn = environment.step(tokens(str(guess)))
        turns += 1
        if turn.done:
            break
        assert turn.reward == 0.1
        low, high = map(int, TOKENIZER.decode(turn.observation).rstrip("=").split("+"))
    assert turn == Turn(1.0, done=True)
    assert turns <= 6  # 51 numbers, halved each time


def test_what_is_no_number_ends_the_guessing_game_and_what_is_out_of_bounds_does_not() -> None:
    environment = GuessTask(TOKENIZER, 0).environment()
    environment.reset(0)
    outside = environment.step(tokens("100"))
    assert (outside.reward, outside.done, TOKENIZER.decode(outside.observation)) == (0.0, False, "10+99=")
    assert environment.step(tokens("<1+2>")) == Turn(0.0, done=True)


def test_the_example_of_several_turns_trains(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = [f"output={tmp_path / 'run'}", "steps=2", "rollout.prompts=3", "rollout.group=4"]
    settings += ["rollout.max_turns=3", "logging.tensorboard=false"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "examples/guess.toml", *arguments]) == 0
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == 2
    assert all(line["turns"] > 1 for line in steps)
    assert all(line["routes/live"] == 0 for line in steps)
