"""The settings of a training run, one class per block of the TOML file, with types, defaults and explanations.

The text below each setting is its explanation. `docs/training.md` shows the same names, defaults and texts, and a test
compares them.
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
    """Return the folder of the tiny model, which comes with the package. `recipes/tiny` has the code that made it."""
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
    """a Hugging Face folder, or `"tiny"` for the small Qwen3-MoE that comes with the package; `model = "tiny"` is short
    for `model.path = "tiny"`"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """the number type of the forward pass: `"float32"` or `"bfloat16"`"""
    router_dtype: Literal["model", "float32"] = "model"
    """the number type of the routers: `"model"` for that of the model, or `"float32"` for weights and logits in
    float32, in the trainer and in an engine that the run starts"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`"cpu"`, `"cuda"`, or `"auto"`: a GPU if torch finds one, otherwise the CPU"""
    attention: Literal["auto", "varlen", "flash", "segments", "masked"] = "auto"
    """how packed sequences attend: `"varlen"` (torch's kernel over sequence lengths), `"flash"` (the package
    flash-attn), `"segments"` (groups of sequences of near lengths, also on CPUs), `"masked"` (one mask over the whole
    bin), or `"auto"` for the first of them that the model and the device support. The run prints which one it uses"""
    gradient_checkpointing: Literal["off", "non_reentrant", "reentrant"] = "off"
    """`"off"`, `"non_reentrant"` or `"reentrant"`: compute activations again in the backward pass, with the routes of
    the forward pass"""
    use_kernels: bool = False
    """use transformers' kernels from the hub. Some of them never call the router module, so this needs
    `replay = "off"`"""


def _without_key(arguments: dict[str, Any], instead: str) -> dict[str, Any]:
    if "api_key" in arguments:
        raise ConfigError(
            "api_key is refused here, because settings are written to config.json and to the report: put the key into "
            f"an environment variable, and {instead}"
        )
    return arguments


class EngineConfig(Block):
    """Where rollouts come from."""

    old_names: ClassVar[Mapping[str, str]] = {"quantise": "quantize"}

    behind_url: ClassVar[tuple[str, ...]] = ("vllm_http", "sglang", "dynamo")

    kind: Literal["embedded", "vllm", "vllm_http", "sglang", "dynamo"] = "embedded"
    """`"embedded"` (transformers, needs no other package), `"vllm"` (in this process), `"vllm_http"`, `"sglang"` or
    `"dynamo"`"""
    url: str = ""
    """the server's URL for vllm_http and sglang, and the frontend's for dynamo: `http://HOST:PORT`, without a user name
    or password"""
    workers: list[str] = Field(default_factory=list)
    """for dynamo: the URLs of the workers' system servers (`DYN_SYSTEM_PORT`), which load the new weights"""
    model: str = ""
    """for dynamo: the name of the served model. Empty: the only one that the frontend serves"""
    api_key_env: str = ""
    """the name of the environment variable that holds the server's key, for vllm_http, sglang and dynamo. The key is
    sent as a bearer token and written to no file"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """the number type of the engine's weights: `"bfloat16"` or `"float32"`"""
    quantize: Literal["none", "fp8"] = "none"
    """`"none"`, or `"fp8"`: round the engine's weights to FP8 blocks, as in an FP8 checkpoint"""
    max_length: PositiveInt = 512
    """the maximum number of tokens of prompt and completion together"""
    weights: str = ""
    """a folder that engine and trainer can both read, for new weights. Empty: shared memory, if it has room"""
    transfer: Literal["auto", "cuda_ipc", "shared_memory", "folder"] = "auto"
    """how new weights reach the engine: `"cuda_ipc"` (vLLM with the plugin on the trainer's GPU), `"shared_memory"`
    (vLLM in this process), `"folder"`, or `"auto"`: the first of them that works for vLLM in this process, tensors for
    the embedded engine, and a folder for servers"""
    count: PositiveInt = 1
    """the number of engines with these settings, for kinds without a URL"""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """more keyword arguments for the engine; they are passed on unchanged"""

    @field_validator("url")
    @classmethod
    def _url_without_password(cls, url: str) -> str:
        try:
            return checked_url(url) if url else url
        except EngineError as error:
            raise ConfigError(str(error)) from None

    @field_validator("workers")
    @classmethod
    def _workers_without_password(cls, urls: list[str]) -> list[str]:
        return [cls._url_without_password(url) for url in urls]

    @field_validator("api_key_env")
    @classmethod
    def _name_of_a_variable(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                "expected the name of an environment variable, such as SERVER_KEY. The given text is not such a name; "
                "it is not shown here, because it may be the key itself"
            )
        return name

    @field_validator("arguments")
    @classmethod
    def _arguments_without_key(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return _without_key(arguments, "set engine.api_key_env to the name of this variable")


class EnvironmentConfig(Block):
    """What the policy is asked."""

    built_in: ClassVar[Mapping[str, str]] = {
        "arithmetic": "router_replay.rl.environments.arithmetic:ArithmeticTask",
        "calculator": "router_replay.rl.environments.calculator:CalculatorTask",
        "jsonl": "router_replay.rl.environments.jsonl:JsonlTask",
        "agent": "router_replay.rl.environments.agent:AgentTask",
    }
    """The short names of `kind`, and the class of each."""

    kind: str = "arithmetic"
    """`"arithmetic"`, `"calculator"` (several turns with a tool), `"jsonl"` (your own problems), `"agent"` (a program
    that uses OpenAI's API), or `"module:Class"` (your own environment)"""
    digits: Annotated[int, Field(ge=1, le=1000)] = 2
    """the number of digits of each operand, for arithmetic and calculator"""
    file: str = ""
    """for jsonl: a file with one JSON object per line, with `prompt` (text or chat messages) and `answer`; for agent:
    a file with one JSON value per line, which the program reads from its standard input"""
    reward: str = ""
    """for jsonl: the reward function `module:function` with `(prompt, completion, answer) -> float`"""
    command: list[str] = Field(default_factory=list)
    """for agent: the program of one episode and its arguments, such as `["python", "agent.py"]`. The last line that it
    prints is the reward"""
    timeout: PositiveFloat = 600.0
    """for agent: the seconds that a program may take for an episode, without those in which it waits for the policy"""
    on_failure: Literal["raise", "zero"] = "raise"
    """for agent: what a program that fails, takes too long or prints no reward means: `"raise"` ends the run, and
    `"zero"` gives the reward 0 and a warning"""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments for a class of your own"""

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
        return _without_key(arguments, "let your environment class read this variable")

    @property
    def task_class(self) -> Any:
        """Import the class of the task; raise ConfigError if that fails, or if its `max_turns` is not valid."""
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
    """problems per step"""
    group: PositiveInt = 8
    """episodes per problem, 2 or more. Their rewards are compared with each other to compute advantages"""
    max_tokens: PositiveInt = 16
    """the maximum number of sampled tokens per turn"""
    max_turns: PositiveInt = 8
    """the maximum number of turns per episode"""
    temperature: PositiveFloat = 1.0
    """the temperature of sampling and of the trainer's log-probs"""
    seeded: bool = True
    """whether requests have a seed, which makes samples reproducible. Set it to false for an SGLang server without
    `--enable-deterministic-inference`"""
    on_missing: Literal["raise", "live"] = "raise"
    """what to do with a row that bears loss and was not captured: `"raise"` an error, or route it `"live"` and count
    it"""
    replay_from: str = ""
    """a file that `record` wrote: its trajectories are trained on again, step by step, and no engine is started"""

    def turns_of(self, task: Any) -> int:
        """Return the maximum number of turns of an episode of this task (or task class)."""
        return self.max_turns if task.max_turns is None else min(self.max_turns, task.max_turns)


class LossConfig(Block):
    """The policy loss. `docs/training.md` has the formulas."""

    old_names: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    kind: LossKind = "grpo"
    """`"grpo"`, `"dr_grpo"` or `"gspo"`"""
    clip_low: PositiveFloat = 0.2
    """ratios are clipped at 1 - clip_low"""
    clip_high: PositiveFloat = 0.28
    """ratios are clipped at 1 + clip_high"""
    normalize: Literal["token", "sequence"] = "token"
    """the mean of grpo: over all tokens of the mini-batch (`"token"`), or over the means of its sequences
    (`"sequence"`). Do not set it for the other kinds, which have their own mean"""
    truncated_importance: NonNegativeFloat = 0.0
    """the largest importance weight old / rollout of a token, 1 or more; 0 switches the weight off"""
    old: Literal["policy", "rollout"] = "policy"
    """where the old log-probs come from: `"policy"` computes them before the updates of a step, with the weights of
    that moment; `"rollout"` takes those of the engine and skips this pass"""
    age_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """the loss of a token is multiplied by this number to the power of its age in policy versions; 0 removes the loss
    of every token that was not sampled by the version being updated"""
    max_age: NonNegativeInt = 0
    """tokens older than this many policy versions have no loss; 0: no such limit"""


class OptimizerConfig(Block):
    """AdamW, and how a step is split into updates."""

    lr: PositiveFloat = 1e-4
    """the learning rate of AdamW"""
    warmup_steps: NonNegativeInt = 0
    """the number of optimizer steps over which the learning rate rises from 0"""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # not strict: TOML has lists only
    """the betas of AdamW"""
    weight_decay: NonNegativeFloat = 0.0
    """the weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    mini_batches: PositiveInt = 2
    """optimizer steps per training step; each uses its own share of the episodes"""


class TrainerConfig(Block):
    """How the trainer's passes run."""

    backend: Literal["transformers", "megatron"] = "transformers"
    """the library that runs the policy: `"transformers"`, or `"megatron"` (Megatron-core, for Qwen3-MoE models; see
    docs/megatron.md)"""
    max_tokens: PositiveInt = 8192
    """the maximum number of tokens of one packed forward pass, padding included; a larger mini-batch takes several
    passes, and their gradients are added"""
    ulysses: PositiveInt = 1
    """the number of ranks that share each sequence; the number of processes must be a multiple of it"""
    compile: bool = False
    """compile the decoder layers with `torch.compile`. The first steps take longer; on a CPU this needs a C++
    compiler"""
    agreement: bool = True
    """count how often the live router would have chosen the replayed experts"""
    routing_metrics: bool = True
    """measure the load of the experts, and the confidence and the entropy of the routers, in every layer"""
    rank_timeout: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    """a run of several processes ends when none of them makes progress for this many seconds"""


class MegatronConfig(Block):
    """How `trainer.backend = "megatron"` divides the model over the processes."""

    tensor_parallel: PositiveInt = 1
    """the number of ranks that share each layer, with sequence parallelism"""
    expert_parallel: PositiveInt = 1
    """the number of ranks that share the experts of each layer"""
    pipeline_parallel: PositiveInt = 1
    """the number of pipeline stages"""
    recompute: Literal["off", "full", "moe"] = "off"
    """compute activations again in the backward pass, with the routes of the forward pass: those of every layer
    (`"full"`), those of the MoE layers (`"moe"`), or none (`"off"`)"""


class ReferenceConfig(Block):
    """The reference model of the KL penalty."""

    kl: NonNegativeFloat = 0.0
    """the weight of the KL to the reference model; 0: no reference model is loaded"""
    path: str = ""
    """the reference model's folder; empty: the policy at the start of the run"""
    replay: bool = False
    """replay the policy's experts in the reference model"""


class AsynchronousConfig(Block):
    """How rollouts run beside the trainer, with `loop = "async"`. `docs/async.md` explains them."""

    max_staleness: NonNegativeInt = 1
    """the largest age of a token in policy versions: the version that an update changes minus the version that sampled
    the token"""
    staleness: str = "strict"
    """who decides what may start and what is too old: `"strict"` (no token older than max_staleness is trained),
    `"admission"` (AReaL's rule: too much is not started, but what takes long is trained at any age), or
    `"module:Class"` (your own)"""
    on_new_weights: Literal["resume", "keep", "recompute"] = "resume"
    """what happens to answers in progress when the weights change: `"resume"` aborts them and continues them with the
    recorded experts forced, `"keep"` continues them with the keys and values of the old weights, `"recompute"` aborts
    them and continues them with experts that the new weights choose"""
    drop_without_signal: bool = False
    """drop groups whose episodes all got the same reward, and play other groups in their place"""
    oversample: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """start more groups than the rule of staleness admits: 1.5 for half a step's groups more"""
    max_in_flight: NonNegativeInt = 0
    """the maximum number of episodes in progress; 0: only the rule of staleness limits them"""
    max_ready: NonNegativeInt = 0
    """start no group while this many finished ones wait for the trainer; 0: only the rule of staleness limits them"""
    environment_threads: PositiveInt = 8
    """the number of threads in which environments and reward functions run"""
    schedule: str = ""
    """the file `schedule/step_*.jsonl` of an earlier run: let everything happen in its order, so that the weights are
    the same to the bit. Needs one embedded engine"""

    @field_validator("staleness")
    @classmethod
    def _short_name_or_class(cls, name: str) -> str:
        module, _, own = name.partition(":")
        if name not in ("strict", "admission") and not (module and own):
            raise ConfigError(
                f"expected 'strict', 'admission' or \"module:Class\" for a class of your own, got {name!r:.80}"
            )
        return name


class EvaluationConfig(Block):
    """How the policy is tested on problems that are not trained."""

    every: NonNegativeInt = 0
    """evaluate every so many policy versions, from version 0 on, and the last version; 0: never"""
    prompts: PositiveInt = 64
    """problems of an evaluation"""
    group: PositiveInt = 1
    """episodes per problem"""
    temperature: NonNegativeFloat = 1.0
    """the temperature of sampling; 0 takes the most likely token"""
    file: str = ""
    """for jsonl: the file with the problems of evaluations. The other environments take problems of another seed"""


class ClusterConfig(Block):
    """Where the processes of a run come from. `docs/cluster.md` explains it."""

    kind: Literal["processes", "ray"] = "processes"
    """`"processes"`: this process, or those of torchrun; `"ray"`: Ray actors, which `router-replay train` starts"""
    address: str = ""
    """for ray: the address of a Ray cluster that runs, or `"auto"` for the one of this machine. Empty: the run starts
    Ray on this machine and ends it"""
    ranks: PositiveInt = 1
    """for ray: the number of trainer ranks"""
    cpus_per_rank: PositiveFloat = 1.0
    """for ray: CPUs that Ray reserves for each trainer rank"""
    gpus_per_rank: NonNegativeFloat = 0.0
    """for ray: GPUs that Ray reserves for each trainer rank"""
    cpus_per_engine: PositiveFloat = 1.0
    """for ray: CPUs that Ray reserves for each engine without a URL"""
    gpus_per_engine: NonNegativeFloat = 0.0
    """for ray: GPUs that Ray reserves for each engine without a URL"""
    environments: NonNegativeInt = 0
    """for ray: the number of processes in which environments and reward functions run; 0: in the first rank"""
    cpus_per_environment: PositiveFloat = 1.0
    """for ray: CPUs that Ray reserves for each process with environments"""
    object_store_bytes: NonNegativeInt = 0
    """for ray without an address: the size of Ray's object store, at least 78643200; 0: Ray's own choice, three tenths
    of the memory. Ray writes to disk what does not fit"""
    restarts: NonNegativeInt = 3
    """for ray: how often the trainer ranks may start again from the newest checkpoint after one of them died"""
    start_timeout: PositiveFloat = 600.0
    """for ray: the seconds to wait for the cluster to have room for the run, and for the engines to start"""


class CheckpointConfig(Block):
    """When the state of the run is saved."""

    every: NonNegativeInt = 10
    """steps between two checkpoints; 0: save only at the end, on Ctrl-C, and when a step fails"""
    keep: PositiveInt = 2
    """the number of newest checkpoints that stay on disk"""


class LoggingConfig(Block):
    """Where the numbers of each step go, besides metrics.jsonl."""

    tensorboard: bool = True
    """write TensorBoard files, if the package is installed"""
    wandb: bool = False
    """log to wandb"""
    project: str = "router-replay"
    """the wandb project"""


class TrainConfig(Block):
    """All settings of a run."""

    replay: ReplayMode = "r3"
    """`"off"`; `"r2"`: record the experts of the old-policy pass and replay them in the update; `"r3"`: replay the
    rollout's experts in both"""
    loop: Literal["sync", "async"] = "sync"
    """`"sync"`: a step samples its episodes and then trains on them; `"async"`: episodes are sampled without a pause
    while the trainer trains"""
    seed: NonNegativeInt = 0
    """the random seed for prompts, sampling and the order of episodes"""
    steps: PositiveInt = 20
    """the number of training steps; each one is a rollout, an update and a weight sync"""
    output: Annotated[pathlib.Path, Field(strict=False)] = pathlib.Path("out/run")
    """the folder for metrics and checkpoints"""
    record: str = ""
    """a file to which the trajectories of each step are appended, for `rollout.replay_from` and `router-replay
    inspect`. Empty: nothing is recorded"""
    engines: list[EngineConfig] = Field(default_factory=list)
    """several engines that work as one: a table `[[engines]]` for each, with the settings of `[engine]`, which must
    then be left out"""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchronous: AsynchronousConfig = AsynchronousConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    megatron: MegatronConfig = MegatronConfig()
    reference: ReferenceConfig = ReferenceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def all_engines(self) -> dict[str, EngineConfig]:
        """Return the settings of every engine by its name: those of `[[engines]]`, or of `[engine]`.

        A table with `count` above 1 stands for as many engines.
        """
        tables = self.engines or [self.engine]
        each = [table for table in tables for _ in range(table.count)]
        return {f"engine{number}": table for number, table in enumerate(each)}

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens of prompt and completion together that every engine takes."""
        return min(table.max_length for table in self.engines or [self.engine])

    @property
    def longest_response(self) -> int:
        """Return the maximum number of tokens that an episode can sample; dr_grpo divides by it."""
        return self.rollout.max_tokens * self.rollout.turns_of(self.environment.task_class)
