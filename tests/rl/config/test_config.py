"""The settings of a run: what is read, what is printed, and what is refused with which words."""

from __future__ import annotations

import ast
import inspect
import itertools
import pathlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_replay.cli import main
from router_replay.errors import ConfigError
from router_replay.rl.config import Block, LossConfig, TrainConfig, load_config, to_toml
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


# -- combinations ---------------------------------------------------------------------------------


def changed(settings: str) -> TrainConfig:
    return load_config(None, settings.split("; ") if settings else [])


@pytest.mark.parametrize(
    ("settings", "world_size", "parts"),
    [
        ("model.use_kernels=true", 1, ["model.use_kernels", "never calls the router module"]),
        ("replay=r2; model.use_kernels=true", 1, ["model.use_kernels"]),
        ("engine.arguments.kv_offloading_size=4", 1, ["engine.arguments.kv_offloading_size=4", "another slot", '"r2"']),
        (
            "engine.arguments.kv_transfer_config.kv_connector=NixlConnector",
            1,
            ["engine.arguments.kv_transfer_config=", "comes from outside"],
        ),
        ("engine.arguments.pipeline_parallel_size=2", 1, ["engine.arguments.pipeline_parallel_size=2"]),
        (
            "engine.arguments.enable_return_routed_experts=false",
            1,
            ["enable_return_routed_experts = false", "no routes to replay"],
        ),
        ("trainer.ulysses=4", 6, ["trainer.ulysses = 4", "6 processes", "divisor of 6"]),
        ("trainer.ulysses=2", 1, ["trainer.ulysses = 2", "start 2 processes"]),
        ("trainer.ulysses=2; model.attention=masked", 2, ['model.attention = "masked"', "attend by sequence lengths"]),
        ("engine.kind=vllm_http", 1, ["engine.url is missing", "vllm_http"]),
        ("engine.kind=sglang", 1, ["engine.url is missing", "sglang"]),
        ("engine.kind=dynamo; engine.url=http://a:1", 1, ["engine.workers is missing", "DYN_SYSTEM_PORT"]),
        ("engine.kind=vllm; engine.model=moe", 1, ["engine.workers and engine.model are for", "dynamo"]),
        ("engines=[{kind = 'embedded'}]; engine.dtype=float32", 1, ["engine and engines are both given", "leave one"]),
        ("engines=[{}, {kind = 'sglang'}]", 1, ["engines.1.url is missing", "sglang"]),
        ("engines=[{}, {arguments = {kv_offloading_size = 4}}]", 1, ["engines.1.arguments.kv_offloading_size=4"]),
        ("engine.kind=sglang; engine.url=http://a:1; engine.count=2", 1, ["engine.count = 2", "one URL is one engine"]),
        ("engine.kind=vllm; engine.count=2", 1, ['2 engines of kind "vllm"', 'cluster.kind = "ray"']),
        ("cluster.ranks=2", 1, ['cluster.ranks with cluster.kind = "processes"', "does not read"]),
        ("environment.kind=jsonl; environment.reward=a:b", 1, ["environment.file is missing"]),
        ("environment.kind=jsonl; environment.file=a", 1, ["environment.reward is missing", "module:function"]),
        ("loss.clip_low=1.0", 1, ["loss.clip_low = 1.0", "below 1"]),
        ("loss.truncated_importance=0.5", 1, ["loss.truncated_importance = 0.5", "1 or more, or 0"]),
        ("rollout.group=1", 1, ["rollout.group = 1", "2 or more"]),
        ("loss.kind=gspo; loss.normalize=sequence", 1, ['loss.normalize = "sequence"', '"gspo"']),
        ("loss.kind=dr_grpo; loss.normalize=token", 1, ['loss.normalize = "token"', '"dr_grpo"']),
        ("model.path=no/such", 1, ['model.path = "no/such"', "no such folder"]),
        ("reference.path=no/such; reference.kl=0.1", 1, ['reference.path = "no/such"', "no such folder"]),
        ("rollout.prompts=2; rollout.group=3; optimizer.mini_batches=7", 1, ["mini_batches = 7", "at most 6"]),
    ],
)
def test_refused_with_the_reason_and_the_way_out(settings: str, world_size: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        check_config(changed(settings), world_size)
    [head, line] = str(info.value).splitlines()
    assert head == "these settings cannot work: 1 problem"
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("settings", "world_size", "parts"),
    [
        ("trainer.ulysses=2", 2, ["trainer.ulysses = 2 with trainer.backend", "use megatron.tensor_parallel"]),
        ("trainer.compile=true", 1, ["trainer.compile = true", "set it to false"]),
        ("replay=off; model.use_kernels=true", 1, ["model.use_kernels = true", "set it to false"]),
        ("model.attention=masked", 1, ['model.attention = "masked"', 'set "auto"']),
        ("model.gradient_checkpointing=reentrant", 1, ['"reentrant"', 'megatron.recompute = "full"']),
        ("megatron.tensor_parallel=2", 1, ["takes 2 processes, but the run has 1", "start 2 processes"]),
        (
            "megatron.tensor_parallel=2; megatron.pipeline_parallel=2",
            6,
            ["takes 4 processes, but the run has 6", "or a multiple"],
        ),
        ("megatron.expert_parallel=2", 1, ["megatron.expert_parallel = 2", "has 1 of the run's 1 processes"]),
        (
            "megatron.expert_parallel=4; megatron.pipeline_parallel=2",
            4,
            ["a pipeline stage has 2 of the run's 4 processes", "a divisor"],
        ),
    ],
)
def test_refused_with_megatron(
    monkeypatch: pytest.MonkeyPatch, settings: str, world_size: int, parts: list[str]
) -> None:
    monkeypatch.setattr("router_replay.rl.config.checks._is_installed", lambda module: True)
    test_refused_with_the_reason_and_the_way_out(f"trainer.backend=megatron; {settings}", world_size, parts)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ("", 1),
        ("megatron.tensor_parallel=2; megatron.expert_parallel=2; megatron.pipeline_parallel=2", 4),
        ("megatron.expert_parallel=4; megatron.recompute=full", 8),
        ("model.dtype=bfloat16; model.router_dtype=float32", 1),
    ],
)
def test_divisions_that_work_with_megatron(monkeypatch: pytest.MonkeyPatch, settings: str, world_size: int) -> None:
    monkeypatch.setattr("router_replay.rl.config.checks._is_installed", lambda module: True)
    assert check_config(changed(f"trainer.backend=megatron; {settings}".rstrip("; ")), world_size) == []


def test_megatron_that_is_not_installed_or_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_replay.rl.config.checks._is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r'needs megatron-core: pip install "megatron-core==0.16.1"'):
        check_config(changed("trainer.backend=megatron"), 1)
    with pytest.raises(ConfigError, match=r"\[megatron\] with trainer.backend = \"transformers\""):
        check_config(changed("megatron.pipeline_parallel=2"), 2)


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(ConfigError) as info:
        check_config(changed("rollout.group=1; loss.clip_low=2.0; engine.kind=sglang"), 1)
    assert len(str(info.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ("", 1),
        ("replay=off; model.use_kernels=true", 1),
        ("model.gradient_checkpointing=non_reentrant", 1),
        ("model.router_dtype=float32; engine.kind=vllm", 1),
        ("model.gradient_checkpointing=reentrant", 1),
        ("replay=r2; model.gradient_checkpointing=reentrant", 1),
        ("replay=off; engine.arguments.kv_offloading_size=4", 1),
        ("replay=r2; engine.arguments.enable_return_routed_experts=false", 1),
        ("engine.arguments.kv_offloading_backend=native; engine.arguments.enable_return_routed_experts=true", 1),
        ("trainer.ulysses=2", 4),
        ("engine.kind=vllm_http; engine.url=http://a:1", 1),
        ('engine.kind=dynamo; engine.url=http://a:1; engine.workers=["http://a:2"]', 1),
        ("engines=[{kind = 'vllm'}, {}, {kind = 'sglang', url = 'http://a:1'}]", 1),
        ("cluster.kind=ray; engine.kind=vllm; engine.count=2", 1),
        ("environment.kind=jsonl; environment.file=a; environment.reward=a:b", 1),
        ("loss.clip_low=0.99; loss.truncated_importance=1.0", 1),
        ("loss.normalize=sequence", 1),
        ("loss.kind=gspo", 1),
        ("rollout.prompts=2; rollout.group=3; optimizer.mini_batches=6", 1),
        ("reference.path=tiny; reference.kl=0.1; reference.replay=true", 1),
        ("reference.path=no/such", 1),
        ("replay=off; reference.kl=0.1", 1),
        ("engine.max_length=64; trainer.max_tokens=64", 1),
    ],
)
def test_what_works_passes_without_a_word(settings: str, world_size: int) -> None:
    assert check_config(changed(settings), world_size) == []


def test_a_model_folder_that_is_there(tmp_path: pathlib.Path) -> None:
    assert check_config(changed(f"model.path={tmp_path}"), 1) == []


def test_a_printed_config_passes_the_checks_again(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(changed("loss.kind=gspo")))
    assert check_config(load_config(file), 1) == []


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("reference.kl=0.1", ["reference.kl = 0.1", "routes live", "reference.replay = true"]),
        ("replay=r2; optimizer.mini_batches=1", ['replay = "r2"', "same weights"]),
        ("reference.replay=true", ["reference.replay = true does nothing", "reference.kl = 0"]),
        ("replay=off; reference.replay=true; reference.kl=0.1", ["does nothing", 'replay = "off"']),
        (
            "model.router_dtype=float32; engine.kind=vllm_http; engine.url=http://a:1",
            ['model.router_dtype = "float32"', "ROUTER_REPLAY_VLLM_ROUTER_DTYPE=float32"],
        ),
        (
            "model.router_dtype=float32; engine.kind=dynamo; engine.url=http://a:1; engine.workers=['http://a:2']",
            ['engine.kind = "dynamo"', "ROUTER_REPLAY_VLLM_ROUTER_DTYPE=float32"],
        ),
        ("engine.max_length=65; trainer.max_tokens=64", ["65 is above trainer.max_tokens = 64"]),
    ],
)
def test_warnings(settings: str, parts: list[str]) -> None:
    [warning] = check_config(changed(settings), 1)
    for part in parts:
        assert part in warning


def test_normalize_set_in_code_counts_as_set() -> None:
    config = TrainConfig(loss=LossConfig(kind="gspo", normalize="token"))
    with pytest.raises(ConfigError, match="normalize"):
        check_config(config, 1)


def rows_of_the_documentation() -> list[tuple[str, str, str]]:
    """The name, the default and the explanation of each setting, as docs/training.md has them."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "training.md").read_text()
    section = page.partition("## Settings\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(name.strip("| `"), default.strip("`"), text.removesuffix(" |")) for name, default, text in rows]


def explanations(block: type[Block], prefix: str = "") -> dict[str, str]:
    """The text below each setting of a block, and of the blocks in it; empty where there is none."""
    [body] = [node.body for node in ast.parse(inspect.getsource(block)).body if isinstance(node, ast.ClassDef)]
    below = {}
    for node, after in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            written = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            below[node.target.id] = " ".join(after.value.value.split()) if written else ""
    found = {}
    for name, field in block.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            found |= explanations(field.annotation, f"{name}.")
        else:
            found[prefix + name] = below[name]
    return found


def test_the_documentation_explains_every_setting_in_the_words_of_its_block() -> None:
    """The block is the home of the text. The page has it too, with links."""
    shown = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, _, text in rows_of_the_documentation()}
    assert shown == explanations(TrainConfig)
    assert all(shown.values())


def test_the_documentation_has_every_setting_with_its_default() -> None:
    documented = [(name, default) for name, default, _ in rows_of_the_documentation()]
    printed, block = [], ""
    for line in to_toml(TrainConfig()).splitlines():
        if line.startswith("["):
            block = line.strip("[]") + "."
        elif line:
            name, _, value = line.partition(" = ")
            printed.append((block + name, value))
    assert documented == printed


@pytest.mark.parametrize("path", sorted((pathlib.Path(__file__).parents[3] / "examples").glob("*.toml")), ids=str)
def test_the_examples_are_configs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Those of a model and a server that are not here are only read; the others pass every check."""
    config = load_config(path)
    if config.model.path == "tiny":
        assert check_config(config, world_size=1) == []
    else:
        (tmp_path / "model").mkdir()
        check_config(load_config(path, [f"model.path={tmp_path / 'model'}"]), world_size=config.trainer.ulysses)


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
