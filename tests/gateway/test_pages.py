"""The code of docs/gateway.md runs as it stands, and so does the command."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from router_replay.gateway import GatewayServer
from tests.gateway.conftest import client_of, http, say

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "gateway.md"


def test_the_code_of_the_page_runs(server: GatewayServer, talker: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {"model": AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float32)}
    for block in blocks:
        assert "http://127.0.0.1:8080" in block
        exec(compile(block.replace("http://127.0.0.1:8080", server.url), str(PAGE), "exec"), names)
    assert names["replayer"].stats.rows_replayed[0] > 0
    assert any(parameter.grad is not None for parameter in names["model"].parameters())


def test_the_command_serves_until_it_is_interrupted(talker: pathlib.Path) -> None:
    options = ["--engine", "embedded", "--port", "0", "--model", str(talker)]
    command = [sys.executable, "-m", "router_replay.cli", "gateway", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("trainers: "))
            url = line.removeprefix("trainers: GET ").partition("/sessions")[0]
            server: Any = type("Server", (), {"url": url})
            say(client_of(server, "command"), "anything", max_tokens=4)
            assert http("GET", f"{url}/sessions/command")["answers"] == 1
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            process.kill()


def test_a_wrong_command_says_what_is_missing(talker: pathlib.Path, capsys: Any, monkeypatch: Any) -> None:
    from router_replay.cli import main

    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for arguments, message in (
        (["--engine", "embedded"], "--engine embedded needs the model's folder"),
        (["--engine", "embedded", "--model", "nowhere"], "the config and the tokenizer of nowhere cannot be read"),
        (["--engine", "x", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: this environment variable"),
        (["--engine", "embedded", "--model", str(talker), "--host", "0.0.0.0"], "--host 0.0.0.0 needs a key"),
    ):
        assert main(["gateway", *arguments]) == 1
        assert message in capsys.readouterr().err
