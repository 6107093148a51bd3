"""`environment.kind = "agent"`: a program with OpenAI's client plays the episodes, and the run trains on them."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from router_replay.cli import main
from router_replay.errors import ConfigError, RewardError
from router_replay.rl.config import EnvironmentConfig, check_config, load_config
from router_replay.rl.environments import Limits, make_task
from router_replay.rl.environments.agent import AgentEnvironment, AgentTask
from router_replay.run_files import read_metrics
from tests.gateway.talker import make_tokenizer

ROOT = pathlib.Path(__file__).parents[3]
TOKENIZER = make_tokenizer()
# Without the client, which takes a second to import. The messages are the words of the command line.
ASK = """
import json, os, sys, time, urllib.request
def ask(said, **more):
    body = json.dumps({"messages": [{"role": "user", "content": said}], **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=600) as answer:
        return json.load(answer)["choices"][0]
"""


@pytest.fixture
def played(tmp_path: pathlib.Path) -> Iterator[Any]:
    """A function that starts an episode of this program."""
    tasks: list[AgentTask] = []

    def play(program: str, **settings: Any) -> AgentEnvironment:
        script = tmp_path / f"agent{len(tasks)}.py"
        script.write_text(ASK + program)
        config = EnvironmentConfig(kind="agent", command=[sys.executable, str(script)], **settings)
        task = make_task(config, TOKENIZER, 0, Limits(max_turns=3, max_tokens=8, max_length=200))
        assert isinstance(task, AgentTask)
        tasks.append(task)
        return task.environment()

    yield play
    for task in tasks:
        task.close()


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text)


PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_requests_are_prompts_and_samples_are_replies(played: Any) -> None:
    game = played("first = ask('one')\nprint(ask(first['message']['content'])['finish_reason'])\nprint('0.25')")
    assert TOKENIZER.decode(game.reset(5)) == PROMPT.format("one")
    turn = game.step(tokens("two<|im_end|>"))
    assert not turn.done
    assert TOKENIZER.decode(turn.prompt) == PROMPT.format("two")
    last = game.step(tokens("12345678"))
    assert (last.done, last.reward, last.kept) == (True, 0.25, 8)


def test_what_the_agent_did_not_read_is_not_kept(played: Any) -> None:
    game = played("a = ask('one', max_tokens=3)\nb = ask('two', stop='3 4')\nprint(len(a['message']['content']))")
    game.reset(0)
    assert game.step(tokens("abcdef")).kept == 3
    last = game.step(tokens("1 2 3 4 5"))
    assert (last.kept, last.reward) == (7, 4.0)  # ab is one token


def test_the_program_gets_its_problem(played: Any, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "first"}\n{"question": "second"}\n')
    program = "ask(json.load(sys.stdin)['question'] + os.environ['ROUTER_REPLAY_PROBLEM'])\nprint(1)"
    game = played(program, file=str(file))
    assert TOKENIZER.decode(game.reset(1)) == PROMPT.format("second1")
    assert game.step(tokens("x<|im_end|>")).reward == 1.0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("ask('one')\nraise ValueError('broken')", "exit status 1 .*ValueError: broken"),
        ("ask('one')\nprint('no number')", "a number in the last line of its output, got exit status 0"),
        ("ask('one')\nprint('nan')", "got exit status 0"),
    ],
)
def test_a_program_that_fails_ends_the_run_or_has_no_reward(played: Any, program: str, message: str) -> None:
    def play(**settings: Any) -> float:
        game = played(program, **settings)
        game.reset(0)
        return game.step(tokens("x<|im_end|>")).reward

    with pytest.raises(RewardError, match=message):
        play()
    assert play(on_failure="zero") == 0.0


@pytest.mark.parametrize("program", ["print(1)", "ask('one', n=2)", "ask('one', logprobs=True)"])
def test_a_program_that_asks_nothing_that_can_be_answered_ends_the_run(played: Any, program: str) -> None:
    with pytest.raises(RewardError, match="the program asked nothing"):
        played(program, on_failure="zero").reset(0)


def test_a_program_that_takes_too_long_is_killed_with_its_children(played: Any, tmp_path: pathlib.Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\nask('one')\ntime.sleep(600)"
    )
    game = played(program, timeout=60.0, on_failure="zero")
    game.reset(0)
    game._left = 0.5  # the rest of its time
    assert game.step(tokens("x<|im_end|>")).reward == 0.0
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 60
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_dropped_episode_kills_its_program_and_frees_its_session(played: Any) -> None:
    game = played("ask('one')\nprint(1)")
    game.reset(0)
    task, process = game._task, game._end.peek()[2][0]
    assert len(task.server.gateway.sessions) == 1
    del game
    assert process.wait(60) != 0
    task.close()
    assert not task.programs


def test_turns_and_length_are_limited_and_the_program_is_told(played: Any) -> None:
    program = (
        "import urllib.error\nfor number in range(4):\n    try:\n        ask(str(number))\n"
        "    except urllib.error.HTTPError as error:\n        code = json.load(error)['error']['code']\n"
        "print(float(code == 'turn_limit'))"
    )
    game = played(program)
    game.reset(0)
    turns = [game.step(tokens("x<|im_end|>")) for _ in range(3)]
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[-1].reward == 1.0


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.command is missing"):
        check_config(load_config(None, ["environment.kind=agent"]), 1)
    with pytest.raises(ConfigError, match=r'are for environment\.kind = "agent"'):
        check_config(load_config(None, ['environment.command=["true"]']), 1)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_task(EnvironmentConfig(kind="agent", command=["true"], file="nothing"), TOKENIZER, 0)


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_the_example_trains_with_the_real_client(
    loop: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command = f'environment.command=["{sys.executable}","examples/agent.py"]'
    settings = [
        f"output={tmp_path}", f"loop={loop}", "steps=1", command, "rollout.prompts=1", "rollout.group=2",
        "optimizer.mini_batches=1", "logging.tensorboard=false",
    ]  # fmt: skip
    if loop == "async":
        settings += ["asynchronous.max_staleness=0", "loss.truncated_importance=2"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", "examples/agent.toml", *arguments]) == 0
    [step] = read_metrics(tmp_path)
    assert 1 <= step["turns"] <= 2
    assert step["routes/live"] == 0
    assert step["routes/replayed"] > 0
