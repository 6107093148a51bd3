"""Let a program play the episodes: it uses OpenAI's API, knows nothing of training, and prints its reward.

    [environment]
    kind = "agent"
    command = ["python", "agent.py"]

Each episode starts the program once and is one session of a gateway in this process. The program finds the gateway by
OPENAI_BASE_URL and OPENAI_API_KEY, which OpenAI's client reads by itself. What it asks becomes the next prompt of the
episode, and what the policy samples becomes the reply:

    reset   starts the program and waits for its first request
    step    answers it, and waits for the next request, or for the end of the program

The policy is sampled by the run, so that weights, versions, routes and resumed answers are those of every environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import pathlib
import queue
import secrets
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

from router_replay.errors import ConfigError, RewardError
from router_replay.gateway.gateway import Gateway
from router_replay.gateway.server import GatewayServer
from router_replay.rl.config import EnvironmentConfig
from router_replay.rl.environments.agent_policy import Asked, Ended, Policy
from router_replay.rl.environments.base import Limits, Task, Turn

logger = logging.getLogger(__name__)
SHOWN = 2000  # characters of a program's output in an error


class AgentTask(Task):
    """Start a program for every episode. The gateway listens on a loopback address, with a key for each episode."""

    threads: ClassVar[int] = 32

    def __init__(self, tokenizer: Any, config: EnvironmentConfig, seed: int, limits: Limits) -> None:
        if not config.command:
            raise ConfigError('environment.kind = "agent" needs environment.command, such as ["python", "agent.py"]')
        self.config, self.seed = config, seed
        self.lines = _lines(config.file)
        self.problems = len(self.lines) if self.lines is not None else None
        self.policy = Policy(limits)
        gateway = Gateway(
            self.policy,
            tokenizer,
            max_length=limits.max_length,
            max_tokens=limits.max_tokens,
            max_turns=limits.max_turns,
            has_logprobs=False,
            max_bytes=1 << 50,  # sessions live as long as their episodes, whose number the run limits
        )
        if not gateway.chat.has_template:
            logger.warning("the tokenizer has no chat template: agents can use the completions route only")
        self.programs: dict[str, weakref.finalize[..., Any]] = {}  # what ends each program, by its session
        self.stop_token_ids = gateway.chat.end_token_ids
        self.server = GatewayServer(gateway, api_key=secrets.token_urlsafe(24)).start()
        weakref.finalize(self, self.server.close)

    @property
    def digest(self) -> str:
        """Return the command, and a digest of the problems if they are in a file."""
        lines = "" if self.lines is None else hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]
        return f"episodes of {json.dumps(self.config.command)}, problems {lines or 'by number'}, seed {self.seed}"

    def close(self) -> None:
        """Kill all programs, and end the gateway."""
        for end in list(self.programs.values()):
            end()
        self.server.close()

    def environment(self) -> AgentEnvironment:
        """Return a new environment, for one episode."""
        return AgentEnvironment(self)


class AgentEnvironment:
    """Play one episode with a program of its own, which is killed if it takes too long or is not needed any more."""

    def __init__(self, task: AgentTask) -> None:
        self._task, self._problem = task, 0
        self._left = task.config.timeout
        self._events: queue.Queue[Asked | Ended] = queue.Queue()
        self._asked: Asked | None = None

    def reset(self, problem: int) -> tuple[int, ...]:
        """Start the program and return the prompt of its first request."""
        self._problem = problem
        self._start()
        event = self._next()
        if not isinstance(event, Asked):
            raise RewardError(f"{self._place}: the program asked nothing: {_shown(event)}")
        self._asked = event
        return tuple(event.request.token_ids)

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answer the program, and return its next prompt, or its reward if it has ended."""
        assert self._asked is not None
        asked = self._asked
        if asked.answer.set_running_or_notify_cancel():  # the program may have given up this request
            asked.answer.set_result(list(token_ids))
        event = self._next()
        kept = self._session.kept.get(asked.request.id)
        if isinstance(event, Asked):
            self._asked = event
            return Turn(done=False, prompt=tuple(event.request.token_ids), kept=kept)
        self._finish()
        return Turn(reward=self._reward(event), kept=kept)

    # -- the program --------------------------------------------------------------------------------

    def _start(self) -> None:
        task, server = self._task, self._task.server
        key = secrets.token_urlsafe(24)
        self._session = server.call(_opened(server.gateway, key))
        task.policy.playing[self._session.name] = self._events
        line = None if task.lines is None else task.lines[self._problem]
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": f"{server.url}/sessions/{self._session.name}/v1",
            "OPENAI_API_KEY": key,
            "ROUTER_REPLAY_PROBLEM": str(self._problem),
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
        }
        try:
            process = subprocess.Popen(
                task.config.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
                errors="replace",
                start_new_session=True,  # so that what it starts can be killed with it
            )
        except OSError as error:
            raise RewardError(f"environment.command cannot be started: {error}") from error
        # Also when the run drops the episode, or ends.
        name = self._session.name
        self._end = weakref.finalize(self, _kill, process, server, name, task.policy, task.programs)
        task.programs[name] = self._end
        reader = threading.Thread(target=_wait, args=(process, line, self._events), daemon=True)
        reader.start()

    def _next(self) -> Asked | Ended:
        """Return the next request of the program, or its end."""
        started = time.monotonic()
        try:
            return self._events.get(timeout=max(0.0, self._left))
        except queue.Empty:
            self._finish()
            seconds = self._task.config.timeout
            return Ended(-signal.SIGKILL, "", f"it was killed after {seconds:g} seconds (environment.timeout)")
        finally:
            self._left -= time.monotonic() - started

    def _finish(self) -> None:
        """Kill what is left of the program, and free its session."""
        self._end()

    def _reward(self, ended: Ended) -> float:
        lines = ended.output.split("\n") if ended.status == 0 else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        try:
            reward = float(last)
        except ValueError:
            reward = math.nan
        if math.isfinite(reward):
            return reward
        wanted = "expected exit status 0 and a number in the last line of its output"
        text = f"{self._place}: {wanted}, got {_shown(ended)}"
        if self._task.config.on_failure == "raise":
            raise RewardError(text + '. environment.on_failure = "zero" would give such an episode the reward 0')
        logger.warning("%s; the reward is 0", text)
        return 0.0

    @property
    def _place(self) -> str:
        return f"problem {self._problem}: {json.dumps(self._task.config.command)}"


async def _opened(gateway: Gateway, key: str) -> Any:
    return gateway.sessions.open(key=key)


def _wait(process: subprocess.Popen[str], line: str | None, events: queue.Queue[Asked | Ended]) -> None:
    """Give the program its problem, read what it prints, and tell its end."""
    try:
        output, errors = process.communicate(line)
    except OSError as error:  # it does not read its input
        output, errors = "", str(error)
    events.put(Ended(process.returncode if process.returncode is not None else -1, output, errors))


def _kill(
    process: subprocess.Popen[str],
    server: GatewayServer,
    name: str,
    policy: Policy,
    task_programs: dict[str, weakref.finalize[..., Any]],
) -> None:
    """Kill the program with everything that it started, and free its session."""
    task_programs.pop(name, None)
    policy.playing.pop(name, None)
    if process.poll() is None:  # the number of a process that has ended may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    server.soon(lambda: server.gateway.sessions.find(name) and server.gateway.sessions.remove(name))


def _lines(file: str) -> list[str] | None:
    if not file:
        return None
    try:
        lines = [line for line in pathlib.Path(file).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"environment.file = {file!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)
        except ValueError as error:
            raise ConfigError(f"environment.file = {file!r}: problem {number} is not JSON: {error}") from error
    if not lines:
        raise ConfigError(f"environment.file = {file!r} has no problems")
    return lines


def _shown(ended: Ended | Asked) -> str:
    assert isinstance(ended, Ended)
    said = f"{ended.output.strip()}\n{ended.errors.strip()}".strip()
    return f"exit status {ended.status} and the output {said[-SHOWN:]!r}"
