"""Load models and tokenizers from folders, shard models over the ranks, and collect their weights again.

Master weights are float32. With bfloat16, or more than one rank, FSDP2 holds them: it shards them, and casts what a
pass needs. One rank in float32 runs the plain model.
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
from router_replay.forward.router_precision import routers_of_their_own
from router_replay.rl.config import ModelConfig, tiny_folder
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
    if ranks.world == 1 and config.dtype == "float32":
        return model.to(ranks.device)
    return shard(model, config, ranks)


def shard(model: Any, config: ModelConfig, ranks: Ranks) -> Any:
    """Shard the model with FSDP2 over all ranks, one unit per decoder layer; float32 routers are units of their own."""
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(ranks.device.type, (ranks.world,))
    units = set(getattr(model, "_no_split_modules", None) or ())
    model.to(ranks.device)
    if config.router_dtype == "float32" and config.dtype != "float32":
        for router in routers_of_their_own(model):  # FSDP2 casts what they are given to this dtype
            fully_shard(router, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
    for module in [module for module in model.modules() if type(module).__name__ in units]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def whole_state(model: Any) -> dict[str, torch.Tensor]:
    """Return all float32 master weights on the first rank's CPU, and nothing elsewhere. All ranks must call it."""
    return get_model_state_dict(model, options=WHOLE_ON_CPU)
