"""The settings of a training run, one class per block of the TOML file, with types, defaults and meanings.

`docs/training.md` has the same tables for readers, and a test compares them.
"""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

import router_replay
from router_replay.engines.http import checked_url
from router_replay.errors import ConfigError, EngineError
from router_replay.rl import users_code

ReplayMode = Literal["off", "r2", "r3"]
LossKind = Literal["grpo", "dr_grpo", "gspo"]
Beta = Annotated[float, Field(ge=0, lt=1)]
TINY = "tiny"
"""The `model.path` that names the small model of this package instead of a folder."""


def tiny_folder() -> pathlib.Path:
    """The finished tiny model, which is installed with the package. `recipes/tiny` has the code that made it."""
    return pathlib.Path(router_replay.__file__).parent / "recipes" / "tiny" / "ready"


class Block(BaseModel):
    """One table of the TOML file."""

    # Strict: "8" is not 8, and 1 is not true. A wrong type is more often a mistake than intended.
    # Pydantic's own errors hide the input, since a URL may hold a password; `load.py` shows what may be shown.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    old_names: ClassVar[Mapping[str, str]] = {}
    """Settings that were renamed, old name to new name. The old name is still read, with a warning."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, values: Any) -> Any:
        for old, new in cls.old_names.items():
            if isinstance(values, dict) and old in values and new not in values:
                warnings.warn(f"the setting {old} is now called {new}; please rename it", FutureWarning, stacklevel=2)
                values = {new if name == old else name: value for name, value in values.items()}
        return values


class ModelConfig(Block):
    """The policy. Its master weights and the optimizer are float32; the forward pass computes in `dtype`."""

    path: str = TINY
    """A Hugging Face folder, or "tiny": the small Qwen3-MoE that comes with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    router_dtype: Literal["model", "float32"] = "model"
    """float32: the routers' weights and logits are float32, in the trainer and in an engine that the run starts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: Literal["off", "non_reentrant", "reentrant"] = "off"
    use_kernels: bool = False
    """Use transformers' kernels from the hub. Some fuse the router and never call it, so replay refuses them."""


def _without_key(arguments: dict[str, Any], instead: str) -> dict[str, Any]:
    if "api_key" in arguments:
        raise ConfigError(
            "api_key would stand in config.json and the report: put the key into an environment variable, and "
            + instead
        )
    return arguments


class EngineConfig(Block):
    """Where rollouts come from."""

    old_names: ClassVar[Mapping[str, str]] = {"quantise": "quantize"}

    kind: Literal["embedded", "vllm", "vllm_http", "sglang"] = "embedded"
    url: str = ""
    """The server's address for vllm_http and sglang, without a user name or password."""
    api_key_env: str = ""
    """The environment variable with the server's key, for vllm_http and sglang. The key itself is not a setting."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantize: Literal["none", "fp8"] = "none"
    """fp8: give the engine weights that were rounded to FP8 blocks, as an FP8 engine would have."""
    max_length: PositiveInt = 512
    weights: str = ""
    """A folder for new weights that the engine and the trainer both see; empty: shared memory if it has room."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the engine, unchanged."""

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
        return _without_key(arguments, "name that as engine.api_key_env")


class EnvironmentConfig(Block):
    """What the policy is asked."""

    built_in: ClassVar[Mapping[str, str]] = {
        "arithmetic": "router_replay.rl.environments.arithmetic:ArithmeticTask",
        "calculator": "router_replay.rl.environments.calculator:CalculatorTask",
        "jsonl": "router_replay.rl.environments.jsonl:JsonlTask",
    }
    """The short names of `kind`, and the classes that they stand for."""

    kind: str = "arithmetic"
    """One of the short names, or `module:Class` for a Task of one's own (`environments/base.py`)."""
    digits: Annotated[int, Field(ge=1, le=1000)] = 2
    """The number of digits of the operands, for arithmetic and calculator."""
    file: str = ""
    """The problems of jsonl: a JSON object with "prompt" (text or chat messages) and "answer" per line."""
    reward: str = ""
    """The reward of jsonl: `module:function` with (prompt, completion, answer) -> float."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a class of one's own, unchanged."""

    @field_validator("kind")
    @classmethod
    def _short_name_or_class(cls, kind: str) -> str:
        module, _, name = kind.partition(":")
        if kind not in cls.built_in and not (module and name):
            names = ", ".join(f"'{name}'" for name in cls.built_in)
            raise ConfigError(f'expected {names} or "module:Class" for an environment of your own, got "{kind:.80}"')
        return kind

    @field_validator("arguments")
    @classmethod
    def _arguments_without_key(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return _without_key(arguments, "let the environment read it there")

    @property
    def task_class(self) -> Any:
        """Import the class of the task; ConfigError if that fails, or if its `max_turns` is no number of turns."""
        found = users_code.load(self.built_in.get(self.kind, self.kind), "environment.kind", "class")
        turns = getattr(found, "max_turns", None)
        if turns is not None and not (type(turns) is int and turns > 0):
            raise ConfigError(
                f"environment.kind = {self.kind!r}: max_turns must be set on the class, as a whole number above 0 or "
                f"None, got {turns!r}"
            )
        return found


class RolloutConfig(Block):
    """How the episodes of a step are sampled."""

    prompts: PositiveInt = 32
    """Problems per step."""
    group: PositiveInt = 8
    """Episodes per problem. An episode's advantage is its difference to the others of its group."""
    max_tokens: PositiveInt = 16
    """The most tokens that a turn samples."""
    max_turns: PositiveInt = 8
    """The most turns of an episode."""
    temperature: PositiveFloat = 1.0
    on_missing: Literal["raise", "live"] = "raise"
    """What to do with a row that bears loss and was not captured: refuse the sample, or route it live and count it."""

    def turns_of(self, task: Any) -> int:
        """The most turns that an episode of this task (or task class) can take."""
        return self.max_turns if task.max_turns is None else min(self.max_turns, task.max_turns)


class LossConfig(Block):
    """The policy loss. `docs/training.md` has the formulas."""

    old_names: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    kind: LossKind = "grpo"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    normalize: Literal["token", "sequence"] = "token"
    """The mean of grpo: over all tokens of the mini-batch, or over the means of its sequences."""
    truncated_importance: NonNegativeFloat = 0.0
    """Multiply each token's loss by its weight old / rollout, at most this; 0: no such weight."""


class OptimizerConfig(Block):
    """AdamW, and how a step is split into updates."""

    lr: PositiveFloat = 1e-4
    warmup_steps: NonNegativeInt = 0
    """The learning rate rises from 0 over this many optimizer steps."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # not strict: TOML has lists only
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    mini_batches: PositiveInt = 2
    """Optimizer steps per training step. Each takes its own share of the episodes."""


class TrainerConfig(Block):
    """How the trainer's passes run."""

    max_tokens: PositiveInt = 8192
    """The size of one packed forward pass in tokens. A larger mini-batch takes several passes."""
    ulysses: PositiveInt = 1
    """The number of ranks that share each sequence."""
    agreement: bool = True
    """Count how often the live router would have chosen the replayed experts."""
    rank_timeout: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    """A run of several processes ends when none of them makes progress for this many seconds."""


class ReferenceConfig(Block):
    """The reference model of the KL penalty."""

    kl: NonNegativeFloat = 0.0
    """The weight of the KL to the reference model; 0: no reference model is loaded."""
    path: str = ""
    """The model's folder; empty: the policy as it was at the start of the run."""
    replay: bool = False
    """Give the reference model the policy's experts."""


class CheckpointConfig(Block):
    """When the state of the run is saved."""

    every: NonNegativeInt = 10
    """Steps between checkpoints; 0: save only at the end, on Ctrl-C, and when a step fails."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""


class LoggingConfig(Block):
    """Where the numbers of each step go, besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files, if the package is installed."""
    wandb: bool = False
    project: str = "router-replay"


class TrainConfig(Block):
    """All settings of a run."""

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
        """The most tokens that an episode can sample; dr_grpo divides by it."""
        return self.rollout.max_tokens * self.rollout.turns_of(self.environment.task_class)
