"""Keys and passwords are refused in the settings of a run, and shown nowhere."""

from __future__ import annotations

import pytest

from router_replay.cli import main
from router_replay.errors import ConfigError
from router_replay.rl.config import TrainConfig, load_config, to_toml
from router_replay.rl.config.checks import check_config
from tests.rl.config.test_config import problems_of


@pytest.mark.parametrize(
    "setting",
    [
        "engine.url=http://user:hunter2@host:8000",
        "engine.url=http://hunter2@host",
        "engine.url=user:hunter2@host",
        "engine.url=['http://user:hunter2@host']",
        "engine.api_key_env=hunter2-is-my-key",
        "engine.arguments.api_key=hunter2",
        "engine.arguments={api_key = 'hunter2'}",
    ],
)
def test_a_secret_in_the_settings_is_refused_and_not_shown(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    [_, line] = problems_of(None, [setting])
    assert line.strip().startswith(setting.partition("=")[0].removesuffix(".api_key"))
    assert "hunter2" not in line
    assert main(["train", "--set", setting, "--dry-run"]) != 0
    assert "hunter2" not in "".join(capsys.readouterr())


def test_a_secret_in_the_settings_is_not_in_the_errors_of_pydantic_either() -> None:
    for engine in ({"url": "http://user:hunter2@host"}, {"api_key_env": "hunter2!"}, {"url": ["hunter2"]}):
        with pytest.raises(ValueError, match="engine") as info:
            TrainConfig.model_validate({"engine": engine})
        assert "hunter2" not in str(info.value)


def test_a_password_in_a_url_is_refused_with_the_way_out() -> None:
    [_, line] = problems_of(None, ["engine.url=http://user:hunter2@host:8000"])
    assert line.strip() == (
        "engine.url: the URL of a server must not contain a user name or password (before @host:8000): write "
        "http://HOST:PORT, and pass the key as api_key=, or in a config name the environment variable that holds the "
        "key as engine.api_key_env"
    )


def test_the_key_itself_stands_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "hunter2")
    config = load_config(None, ["engine.kind=sglang", "engine.url=http://host", "engine.api_key_env=SERVER_KEY"])
    assert check_config(config, 1) == []
    for text in (to_toml(config), repr(config), str(config.model_dump(mode="json"))):
        assert "SERVER_KEY" in text
        assert "hunter2" not in text


def test_a_key_for_an_engine_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="no server to send a key to"):
        check_config(load_config(None, ["engine.api_key_env=SERVER_KEY"]), 1)
