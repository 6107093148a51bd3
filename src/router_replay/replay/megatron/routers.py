"""Find the routers of a Megatron-core model by walking its chunks, and refuse settings that bypass replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch import nn

from router_replay.batch.megatron import MegatronLayout
from router_replay.batch.sharding import ShardKind
from router_replay.errors import ReplayError, shorten
from router_replay.spec import RouterSpec

TESTED = "0.16.1"


@dataclasses.dataclass(frozen=True)
class MegatronRouter:
    """Describes one router: its `name` in the chunk, its `module`, and the absolute id of its decoder `layer`."""

    name: str
    module: nn.Module
    layer: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Describes one model chunk: its `number` on this rank, its `decoder`, and the `routers` of that in layer order."""

    number: int
    name: str
    decoder: nn.Module
    routers: tuple[MegatronRouter, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The ids of the routed layers of this chunk."""
        return tuple(router.layer for router in self.routers)


@dataclasses.dataclass(frozen=True)
class Found:
    """Describes this rank's part of a Megatron model.

    `spec` describes the whole model, over all pipeline stages. `token_group` holds the ranks that route other tokens
    with the same layers (None if the model does not know them), and `pipeline_group` those with other layers.
    `tensor_group` (None without sequence parallelism) and `context_group` hold the ranks with other tokens of the same
    micro-batch.
    """

    chunks: tuple[Chunk, ...]
    spec: RouterSpec
    layout: MegatronLayout
    token_group: Any
    tensor_group: Any
    context_group: Any
    pipeline_group: Any


def find_routers(model_chunks: nn.Module | Sequence[nn.Module], context_kind: ShardKind = "zigzag") -> Found:
    """Find the routers of this rank's `model_chunks`: the list that the schedules get, or one model.

    `context_kind` is how context parallelism cuts the sequences.

    With pipeline parallelism all ranks of the pipeline must call this together: they exchange their layer ids. Raises
    ReplayError if the chunks are not those of one model, or if a setting would bypass replay.
    """
    models = list(model_chunks) if isinstance(model_chunks, Sequence | nn.ModuleList) else [model_chunks]
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise ReplayError(
            "MegatronReplay needs a Megatron model, or the list of its chunks on this rank, got "
            f"{shorten([type(model).__name__ for model in models]) or 'an empty list'}"
        )
    owners = [_owner(number, model) for number, model in enumerate(models)]
    config = owners[0].config
    refuse_settings(config)
    _refuse_other_chunks(owners, config)
    chunks = tuple(_chunk(number, owner) for number, owner in enumerate(owners))
    layers = [layer for chunk in chunks for layer in chunk.layers]
    groups = owners[0].pg_collection
    whole = _over_the_pipeline(layers, groups.pp)
    if len(set(whole)) != len(whole):
        twice = sorted({layer for layer in whole if whole.count(layer) > 1})
        raise ReplayError(
            f"the chunks hold the routers of layers [{shorten(twice)}] twice: pass the chunks of one model, each once"
        )
    if not whole:
        raise ReplayError("the decoder of this model has no router (TopKRouter) in any layer: it has nothing to replay")
    spec = RouterSpec(
        config.num_moe_experts, config.moe_router_topk, tuple(sorted(whole)), num_layers=config.num_layers
    )
    scattered = config.sequence_parallel and groups.tp.size() > 1
    layout = MegatronLayout(
        layers=tuple(layers),
        part=groups.tp.rank() if scattered else 0,
        parts=groups.tp.size() if scattered else 1,
        context_part=groups.cp.rank(),
        context_parts=groups.cp.size(),
        context_kind=context_kind,
    )
    return Found(
        chunks=chunks,
        spec=spec,
        layout=layout,
        token_group=getattr(groups, "tp_dp_cp" if scattered else "dp_cp", None),
        tensor_group=groups.tp if scattered else None,
        context_group=groups.cp,
        pipeline_group=groups.pp,
    )


def refuse_settings(config: Any) -> None:
    """Raise ReplayError if `config`, a TransformerConfig, has a setting with which routes would not be used."""
    balancing = config.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else list(balancing)
    refused = [
        (
            config.moe_router_fusion,
            "moe_router_fusion=True",
            "the fused kernel chooses the experts itself: set it to False",
        ),
        (
            "sinkhorn" in kinds,
            'moe_router_load_balancing_type="sinkhorn"',
            "Sinkhorn routing does not ask for recorded experts: use another type of load balancing",
        ),
        (
            config.moe_expert_capacity_factor is not None,
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}",
            "tokens over the capacity lose recorded experts: set it to None (dropless)",
        ),
        (
            config.cuda_graph_impl != "none",
            f"cuda_graph_impl={config.cuda_graph_impl!r}",
            'a CUDA graph repeats the routes of its capture: set it to "none"',
        ),
        (
            config.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm=True",
            "its schedule runs parts of two micro-batches at a time, outside of the decoder's forward pass: set it "
            "to False",
        ),
        (
            getattr(config, "hybrid_context_parallel", False),
            "hybrid_context_parallel=True",
            "its schedule moves tokens between ranks, and their rows would not follow: set it to False",
        ),
        (
            config.moe_router_force_load_balancing,
            "moe_router_force_load_balancing=True",
            "it replaces the router's logits by random ones, so gate weights would be random: set it to False",
        ),
    ]
    for found, setting, reason in refused:
        if found:
            raise ReplayError(f"routes cannot be replayed with {setting}: {reason}")


def _owner(number: int, model: nn.Module) -> Any:
    """Return the module of a chunk that holds its decoder, such as the GPTModel within DDP and Float16Module."""
    try:
        from megatron.core.transformer.transformer_block import TransformerBlock
    except ImportError as error:
        raise ReplayError(
            f'MegatronReplay needs megatron-core: pip install "megatron-core=={TESTED}" (the version that was tested)'
        ) from error

    owners = [module for module in model.modules() if isinstance(module._modules.get("decoder"), TransformerBlock)]
    if len(owners) > 1:  # an image encoder or a draft model beside the language model
        owners = [owner for owner in owners if _routers(owner)] or owners[:1]
    if len(owners) != 1:
        names = shorten([type(owner).__name__ for owner in owners])
        raise ReplayError(
            f"chunk {number}: expected one module whose `decoder` is a TransformerBlock, got "
            f"{len(owners)}{f' with routers ({names})' if owners else ''} in a {type(model).__name__}: pass the chunks "
            "of the language model (GPTModel)"
        )
    return owners[0]


def _routers(owner: Any) -> list[tuple[str, Any]]:
    from megatron.core.transformer.moe.router import TopKRouter

    found = owner.decoder.named_modules()
    return [(f"decoder.{name}", module) for name, module in found if isinstance(module, TopKRouter)]


def _chunk(number: int, owner: Any) -> Chunk:
    routers = []
    for name, module in _routers(owner):
        if module.layer_number is None:
            raise ReplayError(f"chunk {number}: {name} has no layer_number, so its column of the routes is not known")
        routers.append(MegatronRouter(f"chunk {number}: {name}", module, module.layer_number - 1))
    routers.sort(key=lambda router: router.layer)
    return Chunk(number, f"chunk {number}: decoder", owner.decoder, tuple(routers))


def _refuse_other_chunks(owners: Sequence[Any], config: Any) -> None:
    """Raise ReplayError unless `owners` are all chunks of this rank, in the order of their virtual stages."""
    expected = config.virtual_pipeline_model_parallel_size or 1
    if len(owners) != expected:
        raise ReplayError(
            f"this rank has {expected} model chunks (virtual_pipeline_model_parallel_size), got {len(owners)}: pass "
            "the list that the schedule gets"
        )
    stages = [owner.vp_stage for owner in owners]
    if expected > 1 and stages != list(range(expected)):
        raise ReplayError(
            f"the chunks must be in the order of their virtual stages: expected {list(range(expected))}, got {stages}"
        )


def _over_the_pipeline(layers: list[int], group: Any) -> list[int]:
    """Return the routed layers of all pipeline stages."""
    if group is None or group.size() == 1:
        return layers
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, layers, group=group)
    return [layer for stage in everyone for layer in stage]
