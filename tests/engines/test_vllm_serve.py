"""The server's command line and environment; that it works is what every other HTTP test shows."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from router_replay.engines import vllm_serve
from router_replay.engines.vllm_samples import refuse_version
from router_replay.engines.vllm_serve import plugin_environment, server_command
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
    assert plugin_environment({"VLLM_PLUGINS": "other"})["VLLM_PLUGINS"] == "other,router_replay"
    assert "VLLM_PLUGINS" not in plugin_environment({})
    assert "VLLM_PLUGINS" not in plugin_environment({"VLLM_PLUGINS": "router_replay"})


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0", "0.32.0+cpu", "1.0"])
def test_versions_that_were_not_tried_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"outside the tested range 0\.26 to 0\.30"):
        refuse_version(version)


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0+cpu", "0.30.1"])
def test_versions_that_were_tried(version: str) -> None:
    refuse_version(version)


def test_the_plugin_is_inert_unless_asked_for() -> None:
    code = (
        "import sys, router_replay.engines.vllm_plugin as plugin; plugin.register(); "
        "print(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": "/bin"}
    )
    assert done.stdout.strip() == "False"
