"""The server's command line and environment; that it works is what every other HTTP test shows."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from router_replay.cli import main
from router_replay.engines.vllm import serve as vllm_serve
from router_replay.engines.vllm.inprocess import _variables
from router_replay.engines.vllm.serve import plugin_environment, server_command
from router_replay.engines.vllm.versions import refuse_version
from router_replay.errors import EngineError


def test_the_flags_of_each_version(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(vllm_serve, "installed_version", lambda: "0.30.0")
    command, environment = server_command(str(tmp_path), ["--port", "9"])
    assert command[-2:] == ["--port", "9"]  # the user's come last, and win
    assert {"--enable-return-routed-experts", "--enable-scale-out", "--skip-tokenizer-init"} <= set(command)
    assert environment["ROUTER_REPLAY_VLLM"] == "required"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command[command.index("--weight-transfer-config") + 1] == '{"backend": "router_replay"}'
    monkeypatch.setattr(vllm_serve, "installed_version", lambda: "0.26.0")
    (tmp_path / "tokenizer.json").touch()
    command, _ = server_command(str(tmp_path))
    assert not {"--enable-scale-out", "--skip-tokenizer-init"} & set(command)
    monkeypatch.setenv("ROUTER_REPLAY_VLLM", "0")  # a backend that nobody registers would end the server
    assert "--weight-transfer-config" not in server_command(str(tmp_path))[0]


def test_a_list_of_allowed_plugins_gets_ours_too() -> None:
    assert plugin_environment({"VLLM_PLUGINS": "other"}, "0.30.0")["VLLM_PLUGINS"] == "other,router_replay"
    assert "VLLM_PLUGINS" not in plugin_environment({}, "0.30.0")
    assert "VLLM_PLUGINS" not in plugin_environment({"VLLM_PLUGINS": "router_replay"}, "0.30.0")


@pytest.mark.parametrize(
    ("version", "runner"), [("0.26.0", "0"), ("0.30.1+cpu", "0"), ("0.31.0", "1"), ("0.32.0+cu130", "1")]
)
def test_each_version_runs_the_model_runner_that_captures(version: str, runner: str) -> None:
    assert plugin_environment({"VLLM_USE_V2_MODEL_RUNNER": "7"}, version)["VLLM_USE_V2_MODEL_RUNNER"] == runner
    assert _variables(True, version)["VLLM_USE_V2_MODEL_RUNNER"] == runner


# -- who may reach it ---------------------------------------------------------------------------------


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUTER_REPLAY_API_KEY", "VLLM_API_KEY", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vllm_serve, "installed_version", lambda: "0.30.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "", "[::]", "127.0.0.1.example.org"])
@pytest.mark.parametrize("form", [["--host", "{}"], ["--host={}"], ["--hos", "{}"], ["--port", "1", "--host={}"]])
def test_an_open_address_without_a_key_is_refused(no_keys: None, host: str, form: list[str]) -> None:
    with pytest.raises(EngineError, match="name that by --api-key-env"):
        server_command("model", [part.format(host) for part in form])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_no_key(no_keys: None, host: str) -> None:
    command, _ = server_command("model", ["--host", host])
    assert command[command.index("--middleware") + 1] == "router_replay.engines.vllm.guard.Guard"


def test_the_default_address_is_loopback(no_keys: None) -> None:
    command, environment = server_command("model")
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "ROUTER_REPLAY_API_KEY" not in environment


@pytest.mark.parametrize("variable", ["MY_KEY", "ROUTER_REPLAY_API_KEY", "VLLM_API_KEY"])
def test_the_key_reaches_the_server_by_its_environment_alone(
    no_keys: None, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "hunter2")
    named = variable if variable == "MY_KEY" else ""
    command, environment = server_command("model", ["--host", "0.0.0.0"], named)
    assert environment["ROUTER_REPLAY_API_KEY"] == "hunter2"
    assert "VLLM_API_KEY" not in environment  # which vLLM would ask for besides, on some routes
    assert not any("hunter2" in part for part in command)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--api-key", "hunter2"], "list of processes"),
        (["--api-key=hunter2"], "list of processes"),
        (["--api_key", "hunter2"], "list of processes"),
        (["--grpc"], "gRPC would bypass it"),
    ],
)
def test_what_would_go_past_the_guard_is_refused(no_keys: None, arguments: list[str], reason: str) -> None:
    with pytest.raises(EngineError, match=reason) as caught:
        server_command("model", arguments)
    assert "hunter2" not in str(caught.value)


def test_a_key_that_is_not_there_or_cannot_be_sent(no_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="--api-key-env MY_KEY: this environment variable is not set"):
        server_command("model", [], "MY_KEY")
    monkeypatch.setenv("MY_KEY", "hunter2 hunter2")
    with pytest.raises(EngineError, match="must not contain a space") as caught:
        server_command("model", [], "MY_KEY")
    assert "hunter2" not in str(caught.value)


def test_the_command_line_of_serve(
    no_keys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's --api-key is not taken for a beginning of our --api-key-env: its value would be shown as a name."""
    seen: list[Any] = []
    monkeypatch.setattr(vllm_serve.subprocess, "run", lambda *given, **more: seen.append((given, more)) or Done())
    monkeypatch.setenv("MY_KEY", "hunter2")
    assert main(["serve", "model", "--host", "0.0.0.0", "--api-key-env", "MY_KEY"]) == 0
    [(_, more)] = seen
    assert more["env"]["ROUTER_REPLAY_API_KEY"] == "hunter2"
    assert main(["serve", "model", "--api-key", "hunter2"]) == 1
    assert main(["serve", "model", "--host", "0.0.0.0"]) == 1
    assert "hunter2" not in "".join(capsys.readouterr())
    assert len(seen) == 1


class Done:
    returncode = 0


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "0.33.0rc1+cpu", "1.0"])
def test_versions_that_were_not_tried_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"outside the tested range 0\.26 to 0\.32"):
        refuse_version(version)


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0+cpu", "0.30.1", "0.31.0", "0.32.2+cu130"])
def test_versions_that_were_tried(version: str) -> None:
    refuse_version(version)


def test_the_plugin_is_inert_unless_asked_for() -> None:
    code = (
        "import sys, router_replay.engines.vllm.plugin as plugin; plugin.register(); "
        "print(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    environment = {"PATH": "/bin", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
