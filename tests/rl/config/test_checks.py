"""Settings that are valid one by one: which combinations are refused, which give a warning, and in which words."""

from __future__ import annotations

import pathlib

import pytest

from router_replay.errors import ConfigError
from router_replay.rl.config import LossConfig, TrainConfig, load_config, to_toml
from router_replay.rl.config.checks import check_config


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
        ("engine.transfer=cuda_ipc", 1, ['engine.transfer = "cuda_ipc"', '"embedded"', '"vllm" or "vllm_http"']),
        (
            "engine.kind=vllm_http; engine.url=http://a:1; engine.transfer=shared_memory",
            1,
            ['engine.transfer = "shared_memory"', 'it is for "vllm"; set "auto"'],
        ),
        (
            "engines=[{}, {kind = 'vllm', transfer = 'cuda_ipc'}]; cluster.kind=ray",
            1,
            ['engines.1.transfer = "cuda_ipc" with cluster.kind = "ray"', "takes a folder"],
        ),
        (
            "engine.kind=vllm; engine.transfer=cuda_ipc; model.device=cpu",
            1,
            ['engine.transfer = "cuda_ipc" with model.device = "cpu"', "on one GPU"],
        ),
        ("cluster.ranks=2", 1, ['cluster.ranks with cluster.kind = "processes"', "does not read"]),
        (
            "cluster.kind=ray; cluster.environments=2; environment.kind=agent; environment.command=['a']",
            1,
            ["cluster.environments with environment.kind", "leave cluster.environments out"],
        ),
        (
            "rollout.replay_from=pyproject.toml; evaluation.every=1",
            1,
            ["rollout.replay_from", "no engine that could play evaluations"],
        ),
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
