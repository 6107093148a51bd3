"""Each environment as a rollout drives it: tokens in, tokens out, with the tokenizer of the tiny model."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from router_replay.errors import ConfigError, RewardError, TrainError
from router_replay.recipes.tiny.model import make_tokenizer
from router_replay.rl.config import EnvironmentConfig, TrainConfig, load_config
from router_replay.rl.environments import Environment, Task, make_task
from router_replay.rl.environments.problems import operands
from router_replay.rl.rollout.prompt_lengths import check_prompt_lengths

TOKENIZER = make_tokenizer()
END, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id


def tokens(text: str, *, end: bool = False) -> list[int]:
    return [*TOKENIZER.encode(text), *([END] if end else [])]


def text(token_ids: Any) -> str:
    return TOKENIZER.decode(list(token_ids))


def task_of(kind: str, digits: int = 2, seed: int = 0) -> Task:
    return make_task(EnvironmentConfig.model_validate({"kind": kind, "digits": digits}), TOKENIZER, seed)


def answer_to(question: str) -> int:
    return sum(map(int, question.rstrip("=?").split("+")))


# -- problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["arithmetic", "calculator"])
def test_a_problem_number_always_gives_the_same_prompt(kind: str) -> None:
    task = task_of(kind, seed=3)
    used: Environment = task.environment()
    used.reset(11)
    prompts = [tuple(used.reset(problem)) for problem in range(200)]
    assert prompts == [tuple(task_of(kind, seed=3).environment().reset(problem)) for problem in range(200)]
    assert len(set(prompts)) > 180
    assert prompts != [tuple(task_of(kind, seed=4).environment().reset(problem)) for problem in range(200)]


def test_operands_do_not_change_between_versions_and_machines() -> None:
    assert [operands(0, problem, 2, 2) for problem in range(3)] == [(58, 47), (72, 34), (99, 31)]


def test_operands_have_exactly_the_digits_and_reach_the_whole_range() -> None:
    assert {operands(0, problem, 1, 1)[0] for problem in range(300)} == set(range(10))
    two = [number for problem in range(3000) for number in operands(0, problem, 2, 2)]
    assert set(two) == set(range(10, 100))
    assert 52 < sum(two) / len(two) < 57
    assert {len(str(number)) for problem in range(50) for number in operands(0, problem, 3, 25)} == {25}


# -- arithmetic ---------------------------------------------------------------------------------------


def test_arithmetic_rewards_the_right_answer_that_ends_by_itself() -> None:
    task = task_of("arithmetic", digits=3)
    environment = task.environment()
    for problem in range(20):
        question = text(environment.reset(problem))
        answer = str(answer_to(question))
        assert question.endswith("=")
        assert len(question) == 8
        turn = environment.step(tokens(answer, end=True))
        assert turn.reward == 1.0
        assert turn.done
        assert not turn.observation
        assert environment.step(tokens(str(int(answer) + 1), end=True)).reward == 0.0
    assert task.problems is None
    assert task.stop_token_ids == ()


@pytest.mark.parametrize(
    "spoil", ["cut off", "cut off later", "more", "nothing", "only end", "pad inside", "leading zero"]
)
def test_arithmetic_rewards_nothing_else(spoil: str) -> None:
    environment = task_of("arithmetic").environment()
    answer = str(answer_to(text(environment.reset(0))))
    written = {
        "cut off": tokens(answer),
        "cut off later": tokens(answer + "="),
        "more": tokens(answer + "0", end=True),
        "nothing": [],
        "only end": [END],
        "pad inside": [tokens(answer)[0], PAD, *tokens(answer)[1:], END],
        "leading zero": tokens("0" + answer, end=True),
    }[spoil]
    turn = environment.step(written)
    assert turn.reward == 0.0
    assert turn.done


# -- calculator ---------------------------------------------------------------------------------------


def test_a_calculator_episode_from_prompt_to_reward() -> None:
    task = task_of("calculator")
    environment = task.environment()
    question = text(environment.reset(5))
    first, second, third = map(int, question.rstrip("?").split("+"))
    assert task.stop_token_ids == (tokens(">")[0],)
    turn = environment.step(tokens(f"<{first}+{second}>"))
    assert (turn.done, turn.reward, turn.prompt) == (False, 0.0, None)
    assert text(turn.observation) == f"[{first + second}]"
    turn = environment.step(tokens(f"<{first + second}+{third}>"))
    assert text(turn.observation) == f"[{first + second + third}]"
    turn = environment.step(tokens(str(first + second + third), end=True))
    assert (turn.done, turn.reward, turn.observation) == (True, 1.0, ())


@pytest.mark.parametrize(
    ("written", "observation"),
    [
        ("<12+34>", "[46]"),
        ("<12-34>", "[-22]"),
        ("<12*34>", "[408]"),
        ("99=<1+2>", "[3]"),
        ("<1+2<3+4>", "[7]"),
        ("<+34>", "[!]"),
        ("12+34>", "[!]"),
        ("<12+34+56>", "[!]"),
        ("<>", "[!]"),
        (">", "[!]"),
        ("<12=34>", "[!]"),
        ("<1+2>>", "[!]"),
        (f"<{'9' * 19}*{'9' * 19}>", "[!]"),
    ],
)
def test_calls_are_calculated_and_malformed_ones_get_an_error(written: str, observation: str) -> None:
    environment = task_of("calculator").environment()
    environment.reset(0)
    turn = environment.step(tokens(written))
    assert text(turn.observation) == observation
    assert not turn.done
    assert turn.reward == 0.0


def test_a_turn_that_is_no_call_ends_the_calculator_episode() -> None:
    environment = task_of("calculator").environment()
    answer = answer_to(text(environment.reset(0)))
    for written, reward in [
        (tokens(str(answer), end=True), 1.0),
        (tokens(str(answer)), 0.0),
        (tokens(str(answer + 1), end=True), 0.0),
        (tokens(str(answer) + "<"), 0.0),
        (tokens("<12+34"), 0.0),
        ([], 0.0),
    ]:
        turn = environment.step(written)
        assert (turn.done, turn.reward, turn.observation) == (True, reward, ())


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, ">": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    with pytest.raises(ConfigError, match="no eos_token"):
        make_task(EnvironmentConfig(), PreTrainedTokenizerFast(tokenizer_object=words), 0)
    pairs = Tokenizer(models.BPE({"a": 0, "Ġ": 1, ">": 2}, []))
    pairs.pre_tokenizer = pre_tokenizers.Metaspace("Ġ")
    fast = PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="a")
    with pytest.raises(ConfigError, match=r"stops at '>', which must be one token.*it is 2"):
        make_task(EnvironmentConfig(kind="calculator"), fast, 0)


# -- JSONL --------------------------------------------------------------------------------------------

GRADING = """
seen = []

def exact(prompt, completion, answer):
    seen.append((prompt, completion, answer))
    return completion == answer

def value(prompt, completion, answer):
    return answer() if callable(answer) else answer

def numpy_number(prompt, completion, answer):
    import numpy
    return numpy.float32(0.25)

def tensor(prompt, completion, answer):
    import torch
    return torch.tensor(0.5)

def raises(prompt, completion, answer):
    return 1 / 0

not_a_function = 3
"""


@pytest.fixture
def grading(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of reward functions in the folder where the user stands."""
    name = "grading_of_this_test"
    (tmp_path / f"{name}.py").write_text(GRADING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*importlib.import_module("sys").path])
    monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
    importlib.invalidate_caches()
    return name


def jsonl(folder: pathlib.Path, *lines: Any, reward: str) -> Task:
    file = folder / "problems.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return make_task(EnvironmentConfig(kind="jsonl", file=str(file), reward=reward), TOKENIZER, 0)


def test_jsonl_prompts_and_rewards(tmp_path: pathlib.Path, grading: str) -> None:
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "+2="}]
    plain = {"prompt": "12+34=", "answer": "46", "source": "elsewhere"}
    task = jsonl(tmp_path, plain, b"", {"prompt": messages, "answer": "3"}, b"", reward=f"{grading}:exact")
    assert task.problems == 2
    assert task.stop_token_ids == ()
    environment = task.environment()
    assert text(environment.reset(0)) == "12+34="
    assert environment.step(tokens("46", end=True)).reward == 1.0
    assert environment.step(tokens("47", end=True)).reward == 0.0
    assert text(environment.reset(1)) == "1+2="
    turn = environment.step(tokens("3"))
    assert turn.done
    assert turn.reward == 1.0
    seen = importlib.import_module(grading).seen
    assert seen == [("12+34=", "46", "46"), ("12+34=", "47", "46"), (messages, "3", "3")]
    with pytest.raises(TrainError, match="expected a problem number from 0 to 1, got 2"):
        environment.reset(2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: not JSON"),
        (b"\xff", "line 2: not JSON"),
        (b"[1]", r"line 2: expected an object .*, got \[1\]"),
        (b'{"prompt": "1"}', r'line 2: the field "answer" is missing; this object has \[\'prompt\'\]'),
        (b'{"answer": "1"}', 'line 2: the field "prompt" is missing'),
        (b'{"prompt": "", "answer": 1}', "line 2: the prompt has no tokens"),
        (b'{"prompt": 5, "answer": 1}', 'line 2: "prompt" must be text or a list of chat messages, got 5'),
        (b'{"prompt": [], "answer": 1}', 'line 2: "prompt" must be text or a list'),
        (b'{"prompt": ["hi"], "answer": 1}', 'line 2: message 0 of "prompt" must have "role"'),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', 'line 2: message 0 of "prompt" must have'),
        (b'{"prompt": "two", "answer": 1}', "line 2: the prompt cannot be tokenised"),
    ],
)
def test_a_bad_line_is_named_when_loading(tmp_path: pathlib.Path, grading: str, line: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jsonl(tmp_path, {"prompt": "1+1=", "answer": "2"}, line, reward=f"{grading}:exact")


def test_files_that_cannot_be_used(tmp_path: pathlib.Path, grading: str) -> None:
    reward = f"{grading}:exact"
    with pytest.raises(ConfigError, match="no problems"):
        jsonl(tmp_path, b"", reward=reward)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_task(EnvironmentConfig(kind="jsonl", file=str(tmp_path / "absent"), reward=reward), TOKENIZER, 0)
    with pytest.raises(ConfigError, match=r"needs environment\.file"):
        make_task(EnvironmentConfig(kind="jsonl", reward=reward), TOKENIZER, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", 'must be "module:function"'),
        ("{}", 'must be "module:function"'),
        ("absent_module:f", "cannot be imported: ModuleNotFoundError"),
        ("{}:absent", "does not exist"),
        ("{}:not_a_function", "it is 3"),
    ],
)
def test_a_reward_function_that_cannot_be_found(tmp_path: pathlib.Path, grading: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jsonl(tmp_path, {"prompt": "1+1=", "answer": "2"}, reward=name.format(grading))


@pytest.mark.parametrize(("function", "reward"), [("numpy_number", 0.25), ("tensor", 0.5)])
def test_numbers_of_other_libraries_are_rewards(
    tmp_path: pathlib.Path, grading: str, function: str, reward: float
) -> None:
    environment = jsonl(tmp_path, {"prompt": "1+1=", "answer": "2"}, reward=f"{grading}:{function}").environment()
    environment.reset(0)
    assert environment.step(tokens("2")).reward == reward


@pytest.mark.parametrize("value", [None, "1.0", float("nan"), float("inf"), [1.0]])
def test_what_is_not_a_finite_number_is_a_reward_error(tmp_path: pathlib.Path, grading: str, value: Any) -> None:
    lines = [{"prompt": "1+1=", "answer": 0}, {"prompt": "1+2=", "answer": value}]
    environment = jsonl(tmp_path, *lines, reward=f"{grading}:value").environment()
    environment.reset(0)
    assert environment.step(tokens("2")).reward == 0.0
    environment.reset(1)
    with pytest.raises(
        RewardError, match=f"problem 1: the reward function {grading}:value must return a finite number"
    ):
        environment.step(tokens("3"))


def test_a_reward_function_that_raises_is_named_with_the_problem(tmp_path: pathlib.Path, grading: str) -> None:
    environment = jsonl(tmp_path, {"prompt": "1+1=", "answer": "2"}, reward=f"{grading}:raises").environment()
    environment.reset(0)
    message = f"problem 0: the reward function {grading}:raises raised ZeroDivisionError.*completion '2', answer '2'"
    with pytest.raises(RewardError, match=message) as caught:
        environment.step(tokens("2", end=True))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# -- where reward functions are found -------------------------------------------------------------------


@pytest.fixture
def standing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The folder where the user stands; what tests import from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_module_of_the_current_folder_changes_no_other_import(standing: pathlib.Path) -> None:
    (standing / "my_grading.py").write_text("import my_helper\ndef exact(*_):\n    return my_helper.VALUE\n")
    (standing / "my_helper.py").write_text("VALUE = 0.5\n")
    (standing / "json.py").write_text("raise RuntimeError('the standard library was shadowed')\n")
    (standing / "an_optional_package.py").write_text("")
    before = list(sys.path)
    task = jsonl(standing, {"prompt": "1+1=", "answer": "2"}, reward="my_grading:exact")
    assert sys.path == before
    environment = task.environment()
    environment.reset(0)
    assert environment.step(tokens("2")).reward == 0.5
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("an_optional_package")


def test_a_package_of_the_current_folder_has_reward_functions(standing: pathlib.Path) -> None:
    (standing / "my_package").mkdir()
    (standing / "my_package" / "__init__.py").write_text("")
    (standing / "my_package" / "grading.py").write_text("from . import other\ndef exact(*_):\n    return other.VALUE\n")
    (standing / "my_package" / "other.py").write_text("VALUE = 0.25\n")
    environment = jsonl(standing, {"prompt": "1+1=", "answer": ""}, reward="my_package.grading:exact").environment()
    environment.reset(0)
    assert environment.step(tokens("2")).reward == 0.25


def test_a_file_that_an_installed_module_hides_is_named(standing: pathlib.Path) -> None:
    (standing / "json.py").write_text("def exact(*_):\n    return 1.0\n")
    with pytest.raises(
        ConfigError, match=r"json\.py was not used, because an installed module has the same name: rename your file"
    ):
        jsonl(standing, {"prompt": "1+1=", "answer": "2"}, reward="json:exact")


def test_a_module_that_exits_when_it_is_imported_is_a_config_error(standing: pathlib.Path) -> None:
    (standing / "my_script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="the module my_script cannot be imported: SystemExit: 0"):
        jsonl(standing, {"prompt": "1+1=", "answer": "2"}, reward="my_script:exact")


def test_an_import_inside_a_reward_function_that_comes_too_late_is_explained(standing: pathlib.Path) -> None:
    (standing / "my_lazy.py").write_text("def exact(*_):\n    import my_late\n    return 1.0\n")
    (standing / "my_late.py").write_text("")
    environment = jsonl(standing, {"prompt": "1+1=", "answer": "2"}, reward="my_lazy:exact").environment()
    environment.reset(0)
    with pytest.raises(RewardError, match="Import modules of the current folder at the top of your module"):
        environment.step(tokens("2"))


# -- prompts that do not fit ------------------------------------------------------------------------------


def limits(*settings: str) -> TrainConfig:
    return load_config(None, ["engine.max_length=16", "rollout.max_tokens=6", "trainer.max_tokens=16", *settings])


def test_a_prompt_without_room_for_an_answer_is_named_by_file_and_line(tmp_path: pathlib.Path, grading: str) -> None:
    lines = [{"prompt": "1" * length, "answer": ""} for length in (10, 16, 3, 40)]
    task = jsonl(tmp_path, lines[0], b"", *lines[1:], reward=f"{grading}:exact")
    with pytest.raises(ConfigError) as raised:
        check_prompt_lengths(task, limits())
    message = str(raised.value)
    assert f"{tmp_path / 'problems.jsonl'}, line 3: the prompt has 16 tokens and leaves no room" in message
    assert "line 5: the prompt has 40 tokens" in message
    assert "engine.max_length is 16; raise it" in message
    assert "line 1:" not in message
    assert check_prompt_lengths(task, limits("engine.max_length=64", "trainer.max_tokens=64")) == []


def test_only_the_first_of_many_prompts_that_do_not_fit_are_listed(tmp_path: pathlib.Path, grading: str) -> None:
    task = jsonl(tmp_path, *[{"prompt": "1" * 20, "answer": ""}] * 100, reward=f"{grading}:exact")
    with pytest.raises(ConfigError, match=r"line 5: .*\n  \.\.\. and 95 more"):
        check_prompt_lengths(task, limits())


def test_an_episode_that_no_pass_of_the_trainer_can_take_is_refused(tmp_path: pathlib.Path, grading: str) -> None:
    task = jsonl(tmp_path, {"prompt": "1" * 10, "answer": ""}, reward=f"{grading}:exact")
    assert check_prompt_lengths(task, limits("trainer.max_tokens=16")) == []
    too_long = "line 1: the prompt of 10 tokens and its answer can have 16 tokens together, but one pass"
    with pytest.raises(ConfigError, match=too_long):
        check_prompt_lengths(task, limits("trainer.max_tokens=15"))
    with pytest.raises(ConfigError, match=r"18 .*trainer\.ulysses = 3.*one pass of the trainer takes 16"):
        check_prompt_lengths(task, limits("trainer.ulysses=3"))


def test_answers_that_are_cut_for_want_of_room_are_told(tmp_path: pathlib.Path, grading: str) -> None:
    task = jsonl(tmp_path, *({"prompt": "1" * n, "answer": ""} for n in (5, 12, 15)), reward=f"{grading}:exact")
    [note] = check_prompt_lengths(task, limits())
    assert "2 prompts, such as" in note
    assert "line 2, leave room for less than rollout.max_tokens = 6 tokens" in note


@pytest.mark.parametrize("kind", ["arithmetic", "calculator"])
def test_numbers_too_long_for_the_engine_are_found_at_the_start(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"problem 0: the prompt has .* tokens and leaves no room"):
        check_prompt_lengths(task_of(kind, digits=20), limits())
    assert check_prompt_lengths(task_of(kind, digits=1), limits()) == []
