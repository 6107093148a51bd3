"""Load models and tokenizers from folders, and shard models over the ranks. Each rank reads its own shard.

Master weights are float32. With more than one rank FSDP2 holds them: it shards them, and casts what a pass needs. One
rank runs the plain model, in bfloat16 with copies of the weights (`master_weights.py`).
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from router_replay.engines.pieces import pieces_of
from router_replay.errors import ConfigError, EngineError
from router_replay.forward.experts import use_gathering_experts
from router_replay.forward.router_precision import compute_routers_in_float32, routers_of_their_own
from router_replay.model_building import BUILDING
from router_replay.rl.config import ModelConfig, tiny_folder
from router_replay.rl.policy.master_weights import MasterWeights, Weights
from router_replay.rl.processes.ranks import Ranks
from router_replay.rl.weights.files import WEIGHTS, CheckpointTensors, place_of_rank

logger = logging.getLogger(__name__)


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
    """Load the model onto this rank's device, whole or as this rank's shard.

    Of several ranks each reads its shard only. If the folder's tensors are not those that save_pretrained writes for
    the model, such as those of an older layout, each rank reads the whole model for a moment.
    """
    opened = None if ranks.world == 1 else open_checkpoint(folder, config)
    if opened is not None:
        return _read_shard(*opened, config, ranks)
    model = read_model(folder, config)
    use_gathering_experts(model)
    return model.to(ranks.device) if ranks.world == 1 else shard(model, config, ranks)


def open_checkpoint(folder: pathlib.Path, config: ModelConfig) -> tuple[Any, CheckpointTensors] | None:
    """Return the model of `folder` without weights, and its tensors, of which any part can be read.

    Return None, and log the reason, if only transformers can read the folder. Raise LoadError if it is damaged.
    """
    if config.use_kernels:
        return None
    try:
        model = _without_weights(folder)
        tensors = CheckpointTensors(folder, pieces_of(model), {name: t.shape for name, t in model.state_dict().items()})
    except EngineError as error:
        raise LoadError(f"{folder} could not be loaded as a causal language model: {error}", WEIGHTS) from error
    if unlike := [*tensors.missing, *tensors.misshapen]:
        logger.warning(
            "%s: %s is not there as save_pretrained writes it, so every rank reads the whole model", folder, unlike[0]
        )
        return None
    return model, tensors


def _without_weights(folder: pathlib.Path) -> Any:
    """Return the model that `read_model` would return, with parameters that have no storage; buffers are real."""
    transformers_logging.disable_progress_bar()
    try:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with BUILDING, _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    except Exception as error:  # transformers raises many types
        raise LoadError(f"{folder} could not be loaded as a causal language model: {error}", WEIGHTS) from error
    with contextlib.suppress(OSError):  # most folders have one, and save_pretrained writes it again
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules that are made in the block have parameters without storage.

    Their buffers are computed as always: many are in no checkpoint, and only the constructor knows their values.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@torch.no_grad()
def _read_shard(model: Any, tensors: CheckpointTensors, config: ModelConfig, ranks: Ranks) -> Any:
    """Shard `model`, which has no weights, and read this rank's shard of them from the checkpoint."""
    use_gathering_experts(model)
    buffers = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    shard(model, config, ranks)
    model.to_empty(device=ranks.device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.to(ranks.device)
    held = model.state_dict()
    for name in tensors:
        fill_share(held[name], tensors[name], ranks)
    return model


@torch.no_grad()
def fill_share(target: torch.Tensor, whole: Any, ranks: Ranks) -> None:
    """Copy this rank's share of `whole` into `target`, which is a shard of FSDP2 or a whole tensor.

    `whole` is a tensor, or an object whose `[place]` reads that part of one.
    """
    if not hasattr(target, "to_local"):
        target.copy_(whole[(slice(None),) * target.ndim])
        return
    local = target.to_local()
    place = place_of_rank(target.shape, ranks.rank, ranks.world)
    if local.numel():
        local.copy_(whole[place])


def read_model(folder: pathlib.Path, config: ModelConfig) -> Any:
    """Read the whole model of `folder` in float32 into host memory; raise LoadError if weights are missing."""
    transformers_logging.disable_progress_bar()  # the display shows progress
    extra = {"use_kernels": True} if config.use_kernels else {}
    try:
        with BUILDING:
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
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(ranks.device)
    if config.router_dtype == "float32" and config.dtype != "float32":
        for router in routers_of_their_own(model):  # FSDP2 casts what they are given to this dtype
            fully_shard(router, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model
