"""The settings of a run: what is read, what is printed, and what is wrong in it."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay.cli import main
from router_replay.errors import ConfigError
from router_replay.rl.config import Block, TrainConfig, load_config, to_toml
from router_replay.rl.config.checks import check_config


def problems_of(path: pathlib.Path | None, settings: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as info:
        load_config(path, settings)
    return str(info.value).splitlines()


# -- reading --------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None) == TrainConfig()


def test_settings_change_what_the_file_says_and_the_last_one_wins(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('replay = "r2"\nsteps = 7\n[optimizer]\nlr = 1e-3\nbetas = [0.8, 0]\n')
    config = load_config(file, ["optimizer.lr=1e-5", "steps=8", "steps=9", "output=a/b"])
    assert (config.replay, config.steps, config.output) == ("r2", 9, pathlib.Path("a/b"))
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-5, (0.8, 0.0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3.0", 3.0),
        ("true", True),
        ("word", "word"),
        ("True", "True"),
        ('"3"', "3"),
        ("/a/b c", "/a/b c"),
        ("a=b", "a=b"),
        ("", ""),
        (" 3 ", 3),
        ("[1, 'x']", [1, "x"]),
        ("{a.b = 1}", {"a": {"b": 1}}),
        ("1\nx = 2", "1\nx = 2"),
    ],
)
def test_a_setting_is_a_toml_value_or_text(text: str, value: Any) -> None:
    found = load_config(None, [f"engine.arguments.deep.x={text}"]).engine.arguments["deep"]["x"]
    assert (found, type(found)) == (value, type(value))


# -- what is wrong with it ------------------------------------------------------------------------


def test_every_problem_has_its_line(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('replay = "r4"\nmodel = 3\n[rollout]\ngroup = "8"\nprompts = 0\n[logging]\nwandb = 1\n')
    settings = ["optimizer.betas=[0.9, 1.0, 0.5]", "seed", "optimizer.lr=inf", "engine.url=5"]
    assert problems_of(file, settings) == [
        f"{file} and --set: 9 problems",
        "  --set seed: expected key=value, such as optimizer.lr=1e-5",
        "  replay: expected 'off', 'r2' or 'r3', got \"r4\"",
        "  model: expected a table, got 3",
        "  engine.url: expected text in quotes, got 5",
        "  rollout.prompts: expected a number above 0, got 0",
        '  rollout.group: expected a whole number, got "8"',
        "  optimizer.lr: expected a finite number, got inf",
        "  optimizer.betas: expected at most 2 items, got [0.9, 1.0, 0.5]",
        "  logging.wandb: expected true or false, got 1",
    ]


@pytest.mark.parametrize("text", ["[1", "{a = 1", '"a', "'a"])
def test_a_setting_that_begins_as_toml_must_be_toml(text: str) -> None:
    [_, line] = problems_of(None, [f"logging.project={text}"])
    assert line.startswith(f"  logging.project: expected a TOML value, got {text} (")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("optimizer.betas=[0.9]", "optimizer.betas.1: expected one more item, got [0.9]"),
        ("optimizer.betas=[1.0, 0]", "optimizer.betas.0: expected a number below 1, got 1.0"),
        ("optimizer.betas=0.9", "optimizer.betas: expected a list, got 0.9"),
        ("optimizer.weight_decay=-0.1", "optimizer.weight_decay: expected a number of 0 or more, got -0.1"),
        ("optimizer.lr=word", 'optimizer.lr: expected a number, got "word"'),
        ("steps=2.0", "steps: expected a whole number, got 2.0"),
        ("steps=true", "steps: expected a whole number, got true"),
        ("output=3", "output: expected a path, got 3"),
        ("engine.arguments=3", "engine.arguments: expected a table, got 3"),
        ("seed=2020-02-02", "seed: expected a whole number, got 2020-02-02"),
        (f"seed={'x' * 100}", f'seed: expected a whole number, got "{"x" * 76}...'),
        ("replay.x=1", "replay: expected 'off', 'r2' or 'r3', got {x = 1}"),
    ],
)
def test_what_was_expected_and_what_came(setting: str, line: str) -> None:
    assert problems_of(None, [setting]) == ["--set: 1 problem", f"  {line}"]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: unknown; did you mean optimizer.lr?"),
        ("optimiser.lr=1", "optimiser: unknown; did you mean optimizer?"),
        ("lr=1", "lr: unknown; did you mean optimizer.lr?"),
        ("max_tokens=1", "max_tokens: unknown; did you mean rollout.max_tokens or trainer.max_tokens?"),
        ("trainer.replay=off", "trainer.replay: unknown; did you mean replay or reference.replay?"),
        ("checkpoint.xyz=1", "checkpoint.xyz: unknown; the known names are every, keep"),
        ("engines=[{}, {kinds = 'vllm'}]", "engines.1.kinds: unknown; did you mean engines.1.kind?"),
    ],
)
def test_an_unknown_key_names_the_nearest(setting: str, line: str) -> None:
    assert problems_of(None, [setting]) == ["--set: 1 problem", f"  {line}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = \n", "(at line 2, column 5)"),
        ("a = 1\nb = [1,\n", "(at line 2, the end of the file)"),
        ("[loss]\n[loss]\n", "at line 2, column 6)"),
    ],
)
def test_a_syntax_error_has_its_file_and_line(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    [line] = problems_of(file, [])
    assert line.startswith(f"{file}: not TOML: ")
    assert message in line


def test_a_file_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    absent = tmp_path / "absent.toml"
    assert problems_of(absent, []) == [f"{absent}: this file does not exist"]
    assert problems_of(tmp_path, []) == [f"{tmp_path}: cannot be read: Is a directory"]
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'output = "\xe9"')
    assert problems_of(latin, []) == [f"{latin}: expected UTF-8, got byte 0xe9 at offset 10"]


# -- printing -------------------------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = text | st.booleans() | st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
urls = st.sampled_from(["", "http://here", "https://[::1]:8000/é'"])
positive = st.floats(min_value=1e-300, max_value=1e300)
changes = st.fixed_dictionaries(
    {},
    optional={
        "replay": st.sampled_from(["off", "r2", "r3"]),
        "output": text.filter(lambda name: "\0" not in name),
        "engine": st.fixed_dictionaries({"url": urls, "arguments": st.dictionaries(text, values, max_size=3)}),
        "loss": st.fixed_dictionaries(
            {"kind": st.sampled_from(["grpo", "dr_grpo", "gspo"])},
            optional={"normalize": st.sampled_from(["token", "sequence"]), "clip_low": positive},
        ),
        "optimizer": st.fixed_dictionaries({"lr": positive, "betas": st.just([0.25, 0])}),
        "logging": st.fixed_dictionaries({"wandb": st.booleans(), "project": text}),
    },
)


@given(changes)
def test_what_is_printed_loads_back_as_an_equal_config(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, Any]
) -> None:
    config = TrainConfig.model_validate(changed)
    file = tmp_path_factory.getbasetemp() / "round.toml"
    file.write_bytes(to_toml(config).encode())
    again = load_config(file)
    assert again == config
    if config.loss.kind != "grpo":  # where being set at all is what is refused
        assert ("normalize" in again.loss.model_fields_set) == ("normalize" in config.loss.model_fields_set)


def test_all_settings_are_printed() -> None:
    config = load_config(None, ["engine.arguments={a = 1, 'b c' = [true]}"])
    printed = to_toml(config)
    assert printed.startswith(
        'replay = "r3"\nloop = "sync"\nseed = 0\nsteps = 20\noutput = "out/run"\nrecord = ""\nengines = []\n\n'
        '[model]\npath = "tiny"\n'
    )
    assert 'arguments = {a = 1, "b c" = [true]}\n' in printed
    names = [name for _, block in TrainConfig() if isinstance(block, Block) for name in type(block).model_fields]
    assert [line.split(" = ")[0] for line in printed.splitlines() if " = " in line][7:] == names


def test_several_engines_are_printed_as_tables_in_place_of_the_one(tmp_path: pathlib.Path) -> None:
    given = "engines=[{kind = 'vllm', count = 2, max_length = 64}, {kind = 'sglang', url = 'http://a:1'}]"
    config = load_config(None, [given, "cluster.kind=ray"])
    assert [(name, table.kind) for name, table in config.all_engines.items()] == [
        ("engine0", "vllm"), ("engine1", "vllm"), ("engine2", "sglang"),
    ]  # fmt: skip
    assert config.max_length == 64
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(config))
    assert file.read_text().count("[[engines]]") == 2
    assert load_config(file) == config
    assert check_config(load_config(file), 1) == []


def test_what_toml_cannot_say() -> None:
    config = TrainConfig.model_validate({"engine": {"arguments": {"a": {"b": None}}}})
    with pytest.raises(ConfigError, match=r"^engine\.arguments\.a\.b: expected text, .* got None$"):
        to_toml(config)


def test_only_tasks_of_several_turns_have_longer_responses() -> None:
    """Dr.GRPO divides by it: a task of one turn must not be divided by turns that it cannot take."""
    lengths = {
        kind: load_config(None, [f"environment.kind={kind}", "rollout.max_tokens=5", "rollout.max_turns=3"])
        for kind in ("arithmetic", "jsonl", "calculator")
    }
    assert {kind: config.longest_response for kind, config in lengths.items()} == {
        "arithmetic": 5, "jsonl": 5, "calculator": 15,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [("loss.normalise=sequence", "loss.normalize=sequence"), ("engine.quantise=fp8", "engine.quantize=fp8")],
)
def test_a_renamed_setting_is_read_under_its_old_name_with_a_warning(old: str, new: str) -> None:
    name = new.partition("=")[0].partition(".")[2]
    with pytest.warns(FutureWarning, match=f"is now called {name}; please rename it"):
        config = load_config(None, [old])
    assert config == load_config(None, [new])
    assert name in to_toml(config)
    with pytest.raises(ConfigError, match="unknown; did you mean"):
        load_config(None, [old, new])


def test_a_model_may_be_named_alone() -> None:
    assert load_config(None, ["model=tiny"]) == load_config(None, ["model.path=tiny"])
    both = load_config(None, ["model=folder", "model.dtype=bfloat16"]).model
    assert (both.path, both.dtype) == ("folder", "bfloat16")


def test_a_dry_run_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", "model.path=tiny", "--set", "optimizer.lr=3e-5"]) == 0
    assert "lr = 3e-05" in capsys.readouterr().out


def test_ctrl_c_before_the_run_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("router_replay.rl.loop.train.train", interrupted)
    assert main(["train", "--set", "model.path=tiny"]) == 130
    assert capsys.readouterr().err == "router-replay train: interrupted\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = " + "[" * 100_000, "lists or tables are nested too deeply"),
        ("[engine]\narguments = {a = " + "[" * 300 + "]" * 300 + "}", "nested too deeply: expected at most 64 levels"),
        ("seed = 1" + "0" * 5000, "not TOML: Exceeds the limit"),
        ("[environment]\ndigits = 5000", r"environment\.digits: expected a number of at most 1000, got 5000"),
    ],
    ids=["brackets", "arguments", "digits of a number", "digits"],
)
def test_text_that_breaks_a_parser_is_named(tmp_path: pathlib.Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    "setting", ["seed=" + "[" * 50_000, "engine.arguments." + ".".join("a" * 3000) + "=1", "seed=1" + "0" * 5000]
)
def test_a_setting_that_breaks_a_parser_is_named(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply|expected a TOML value"):
        load_config(None, [setting])
