"""Every setting of a training run, typed, in one place: read from TOML and `--set`, and printed as TOML again.

    config = load_config(pathlib.Path("config.toml"), ["replay=off", "optimizer.lr=1e-5"])
    print(to_toml(config))  # every setting, as the run will use it

One class per block of the TOML file; `docs/training.md` has the same tables for readers. `config_checks.py` refuses
settings that are right one by one and cannot work together.
"""

from __future__ import annotations

import difflib
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from router_replay.engines.http import checked_url
from router_replay.errors import ConfigError, EngineError
from router_replay.rl import toml_text

ReplayMode = Literal["off", "r2", "r3"]
LossKind = Literal["grpo", "dr_grpo", "gspo"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Block(BaseModel):
    # Strict: "8" is not 8 and 1 is not true, since a quote or a type too many is more often a slip than a wish.
    # Input is hidden in pydantic's own errors: a URL may hold a password. `_problem` below shows what may be shown.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class ModelConfig(Block):
    """The policy. Master weights and the optimizer are float32; `dtype` is what the forward computes in."""

    path: str = "tiny"
    """A Hugging Face folder, or "tiny": the small Qwen3-MoE of `router-replay make-model`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: Literal["off", "non_reentrant", "reentrant"] = "off"
    use_kernels: bool = False
    """transformers' kernels from the hub. Some fuse the router and never call it: refused with replay."""


class EngineConfig(Block):
    """Where rollouts come from."""

    kind: Literal["embedded", "vllm", "vllm_http", "sglang"] = "embedded"
    url: str = ""
    """Of the server, for vllm_http and sglang; without a user name or password."""
    api_key_env: str = ""
    """The environment variable that holds the server's key, for vllm_http and sglang; the key itself stands nowhere."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantise: Literal["none", "fp8"] = "none"
    """Give the engine weights that were rounded to FP8 blocks, as FP8 rollouts have."""
    max_length: PositiveInt = 512
    weights: str = ""
    """A folder that engine and trainer both see, for new weights on their way; empty: shared memory if it has room."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the engine as they are."""

    @field_validator("url")
    @classmethod
    def _url_without_password(cls, url: str) -> str:
        try:
            return checked_url(url) if url else url
        except EngineError as error:
            raise ConfigError(str(error)) from None

    @field_validator("api_key_env")
    @classmethod
    def _name_of_a_variable(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                "expected the name of an environment variable, such as SERVER_KEY; what came is none, and is not shown "
                "here, since it may be the key itself"
            )
        return name

    @field_validator("arguments")
    @classmethod
    def _arguments_without_key(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if "api_key" in arguments:
            raise ConfigError(
                "api_key would stand in config.json and the report: put the key into an environment variable, and name "
                "that as engine.api_key_env"
            )
        return arguments


class EnvironmentConfig(Block):
    """What the policy is asked."""

    kind: Literal["arithmetic", "calculator", "jsonl"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=1000)] = 2
    """Of the operands, for arithmetic and calculator."""
    file: str = ""
    """One JSON object with "prompt" (text or chat messages) and "answer" per line, for jsonl."""
    reward: str = ""
    """`module:function` with (prompt, completion, answer) -> float, for jsonl."""


class RolloutConfig(Block):
    prompts: PositiveInt = 32
    """Problems per step."""
    group: PositiveInt = 8
    """Episodes per problem, compared with each other."""
    max_tokens: PositiveInt = 16
    """Sampled per turn."""
    max_turns: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    on_missing: Literal["raise", "live"] = "raise"
    """A row that bears loss and was not captured: refuse the sample, or route it live and count it."""


class LossConfig(Block):
    kind: LossKind = "grpo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    normalise: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the mini-batch, or over sequences of the mean over their tokens. For grpo only."""
    truncated_importance: NonNegativeFloat = 0.0
    """The largest weight old / rollout that a token's loss is multiplied with; 0: no such weight."""


class OptimizerConfig(Block):
    lr: PositiveFloat = 1e-4
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises from 0."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # not strict: TOML has lists only
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    mini_batches: PositiveInt = 2
    """Optimizer steps per training step, each on its own share of the episodes."""


class TrainerConfig(Block):
    max_tokens: PositiveInt = 8192
    """Slots of one packed forward pass; more are accumulated."""
    ulysses: PositiveInt = 1
    """Ranks that share each sequence."""
    agreement: bool = True
    """Count how often the live router would have chosen the replayed experts."""
    rank_timeout: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    """Seconds after which a run of several processes ends when none of them gets on."""


class ReferenceConfig(Block):
    kl: NonNegativeFloat = 0.0
    """Weight of the KL to the reference model; 0: there is no reference model."""
    path: str = ""
    """A folder; empty: the policy as it was at the start of the run."""
    replay: bool = False


class CheckpointConfig(Block):
    every: NonNegativeInt = 10
    """Steps; 0: only at the end, on Ctrl-C, and when a step fails."""
    keep: PositiveInt = 2


class LoggingConfig(Block):
    tensorboard: bool = True
    """Where the package is installed."""
    wandb: bool = False
    project: str = "router-replay"


class TrainConfig(Block):
    """A whole run."""

    replay: ReplayMode = "r3"
    seed: NonNegativeInt = 0
    steps: PositiveInt = 20
    output: Annotated[pathlib.Path, Field(strict=False)] = pathlib.Path("out/run")
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def longest_response(self) -> int:
        """Tokens that an episode can sample at most; only the calculator takes more than one turn."""
        return self.rollout.max_tokens * (self.rollout.max_turns if self.environment.kind == "calculator" else 1)


def load_config(path: pathlib.Path | None, settings: Sequence[str] = ()) -> TrainConfig:
    """The defaults, changed by the file, changed by `settings` in their order; ConfigError lists all that is wrong.

    A setting is `dotted.key=value` with a value as TOML writes it; what is no TOML value is text: `replay=off`.
    """
    tree = {} if path is None else toml_text.read_file(path)
    problems = []
    for setting in ("", *settings):
        if setting and (problem := _apply(tree, setting)):
            problems.append(problem)
        if isinstance(tree.get("model"), str):  # `model = "tiny"` is short for its path
            tree["model"] = {"path": tree["model"]}
    places = " and ".join(([str(path)] if path else []) + (["--set"] if settings else []))
    toml_text.check_depth(tree, places)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(dict(detail)) for detail in error.errors(include_url=False)]
    if problems:
        raise config_error(places, problems)
    return config


def config_error(place: str, problems: Sequence[str]) -> ConfigError:
    """One error for all problems, a line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{place}: {count}", *problems]))


def to_toml(config: TrainConfig) -> str:
    """Every setting with its value, as TOML that `load_config` reads as an equal config."""
    outside = "".join(_line("", name, value) for name, value in config if not isinstance(value, Block))
    blocks = [
        f"[{name}]\n" + "".join(_line(name, key, item) for key, item in block if not _is_left_out(block, key))
        for name, block in config
        if isinstance(block, Block)
    ]
    return "\n".join([outside, *blocks])  # TOML wants what is outside of blocks first


def _line(block: str, name: str, value: Any) -> str:
    return f"{name} = {toml_text.write_value(value, _dotted(block, name))}\n"


def _dotted(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _is_left_out(block: Block, key: str) -> bool:
    """`normalise` means nothing but for grpo, and whoever sets it elsewhere is told so: do not set it by printing."""
    return (
        isinstance(block, LossConfig)
        and key == "normalise"
        and block.kind != "grpo"
        and key not in block.model_fields_set
    )


def _apply(tree: dict[str, Any], setting: str) -> str | None:
    """Put one `a.b=c` into the tree; the problem with it, if there is one."""
    dotted, equals, text = setting.partition("=")
    *blocks, name = keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        return f"--set {setting}: expected key=value, such as optimizer.lr=1e-5"
    try:
        value = toml_text.read_value(text.strip())
    except ConfigError as error:
        return f"{'.'.join(keys)}: {error}"
    for block in blocks:
        if not isinstance(tree.get(block), dict):
            tree[block] = {}
        tree = tree[block]
    tree[name] = value
    return None


# Where pydantic's own words are not those of a TOML file.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_type": "a number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of {ge:g} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "missing": "one more item",
    "model_type": "a table",
    "path_type": "a path",
    "string_type": "text in quotes",
    "too_long": "at most {max_length} items",
    "tuple_type": "a list",
}


def _problem(detail: dict[str, Any]) -> str:
    """One of pydantic's errors in one line."""
    location = tuple(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return _unknown(location)
    if detail["type"] == "value_error":  # of our own checks, which say what may be shown of the input
        return f"{'.'.join(location)}: {detail['ctx']['error']}"
    if detail["type"] in _EXPECTED:
        expected = _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))
    else:
        expected = detail["msg"].removeprefix("Input should be ")
    try:
        came = toml_text.write_value(detail["input"], "")
    except ConfigError:
        came = str(detail["input"])
    if "@" in came:
        came = "a value that is not shown here, since it may hold a password"
    came = came if len(came) <= 80 else came[:77] + "..."
    return f"{'.'.join(location)}: expected {expected}, got {came}"


def _unknown(location: tuple[str, ...]) -> str:
    """An unknown key: the nearest of its block, else the same name elsewhere, else all that there is."""
    block, name = ".".join(location[:-1]), location[-1]
    known = list(_blocks()[block].model_fields)
    near = [_dotted(block, key) for key in difflib.get_close_matches(name, known, n=1)]
    near = near or [_dotted(other, name) for other, model in _blocks().items() if name in model.model_fields]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"{'.'.join(location)}: unknown; {hint}"


def _blocks() -> dict[str, type[Block]]:
    """Each block of the file by its name; "" is the settings outside of any."""
    inner = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    blocks = {name: kind for name, kind in inner.items() if isinstance(kind, type) and issubclass(kind, Block)}
    return {"": TrainConfig, **blocks}
