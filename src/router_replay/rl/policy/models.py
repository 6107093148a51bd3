"""Load models and tokenizers from folders, shard models over the ranks, and collect their weights again.

Master weights are float32. With more than one rank FSDP2 holds them: it shards them, and casts what a pass needs. One
rank runs the plain model, in bfloat16 with copies of the weights (`master_weights.py`).
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from router_replay.errors import ConfigError
from router_replay.forward.experts import use_gathering_experts
from router_replay.forward.router_precision import compute_routers_in_float32, routers_of_their_own
from router_replay.rl.config import ModelConfig, tiny_folder
from router_replay.rl.policy.master_weights import MasterWeights, Weights
from router_replay.rl.processes.ranks import Ranks

WEIGHTS = "model.safetensors"

WHOLE_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


class LoadError(ConfigError):
    """A model folder cannot be used. `file` is the name of the file that is wrong."""

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


def model_folder(path: str) -> pathlib.Path:
    """Return the folder of a model; "tiny" is the one in this package."""
    if path == "tiny":
        return tiny_folder()
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the model path {path!r} is not a folder with a config.json: give a folder that save_pretrained wrote, "
            'or "tiny"'
        )
    return folder


def load_tokenizer(folder: pathlib.Path) -> Any:
    """Load the tokenizer of a model folder; raise LoadError if transformers cannot."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise LoadError(f"{folder} has no tokenizer that transformers can load: {error}", "tokenizer.json") from error


def load_model(folder: pathlib.Path, config: ModelConfig, ranks: Ranks) -> Any:
    """Load the model onto this rank's device, whole or as this rank's shard."""
    model = read_model(folder, config)
    use_gathering_experts(model)
    return model.to(ranks.device) if ranks.world == 1 else shard(model, config, ranks)


def read_model(folder: pathlib.Path, config: ModelConfig) -> Any:
    """Read the whole model of `folder` in float32 into host memory; raise LoadError if weights are missing."""
    transformers_logging.disable_progress_bar()  # the display shows progress
    extra = {"use_kernels": True} if config.use_kernels else {}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    except Exception as error:  # a truncated file fails in safetensors, wrong shapes fail in transformers
        raise LoadError(f"{folder} could not be loaded as a causal language model: {error}", WEIGHTS) from error
    if absent := sorted(set(info["missing_keys"])):  # transformers would fill these with random numbers
        raise LoadError(f"{folder} lacks {len(absent)} weights of the model, such as {absent[0]}", WEIGHTS)
    return model


def weights_of(model: Any, config: ModelConfig, ranks: Ranks) -> Weights:
    """Return what lets `model`, a result of `load_model`, compute in `config.dtype`."""
    if ranks.world > 1 or config.dtype == "float32":  # FSDP2 casts by itself, and float32 needs no cast
        return Weights()
    kept: tuple[Any, ...] = ()
    if config.router_dtype == "float32":
        compute_routers_in_float32(model)
        kept = tuple(routers_of_their_own(model))
    return MasterWeights(model, getattr(torch, config.dtype), kept)


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each decoder layer by itself. All layers of one kind share one graph, with any number of tokens.

    `options` go to torch.compile.
    """
    for layer in _layers(model):
        layer.compile(dynamic=True, **options)  # bins differ in their number of tokens


def _layers(model: Any) -> list[Any]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if _plain_name(module) in kinds]


def _plain_name(module: Any) -> str:
    """Return the name of the module's class; FSDP2 puts a class of its own in front of it."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")).__name__


def shard(model: Any, config: ModelConfig, ranks: Ranks) -> Any:
    """Shard the model with FSDP2 over all ranks, one unit per decoder layer; float32 routers are units of their own."""
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(ranks.device.type, (ranks.world,))
    model.to(ranks.device)
    if config.router_dtype == "float32" and config.dtype != "float32":
        for router in routers_of_their_own(model):  # FSDP2 casts what they are given to this dtype
            fully_shard(router, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """Return all float32 master weights on the first rank's CPU, and nothing elsewhere. All ranks must call it."""
    return get_model_state_dict(model, options=WHOLE_ON_CPU)
