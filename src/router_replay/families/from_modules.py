"""Find the routers of a model's text decoder, in the order in which a forward pass calls them.

    >>> [(r.layer, r.name) for r in find_routers(model).routers]
    [(1, 'model.layers.1.mlp.gate'), (2, 'model.layers.2.mlp.gate')]

A router belongs to a stack: the innermost PreTrainedModel that holds it. Its layer is the first number
in its path below that stack, so that dense layers, pipeline stages and wrappers cannot shift it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from router_replay.errors import ReplayError
from router_replay.families import measured
from router_replay.families.records import by_class, where_router
from router_replay.families.types import Choice, Where
from router_replay.families.versions import installed, is_older
from router_replay.spec import RouterSpec

# Attributes with the width of the tensor that is chosen from, most specific first: zaya can choose to skip,
# longcat_flash has experts that compute nothing, and only these attributes of both count them.
WIDTH_ATTRIBUTES = ("num_router_classes", "n_routed_experts", "num_experts")
TOP_K_ATTRIBUTES = ("top_k",)
CONFIG_WIDTH = ("num_experts",)  # gemma4 and diffusion_gemma keep the numbers only in their config
CONFIG_TOP_K = ("top_k_experts",)

# Words in a module's path that mark it as not the text decoder. An encoder is left out only if there is a decoder.
NOT_DECODER = {
    "vision": "routes image patches",
    "visual": "routes image patches",
    "audio": "routes audio frames",
    "talker": "generates speech from the decoder's text; wrap model.talker itself to replay it",
    "mtp": "a multi-token prediction head",
    "nextn": "a multi-token prediction head",
    "draft": "a draft head",
    "assistant": "a draft head",
}
ENCODER = "routes the prompt of an encoder-decoder; rows belong to decoder tokens"

# Path components that wrappers of a part of a model add to the paths below it: torch.compile, FSDP1, activation
# checkpointing, PEFT.
WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")

# The order in which the forward of a layer with two routers calls them.
CALL_ORDER = ("self_attention", "self_attn", "mlp")


@dataclasses.dataclass(frozen=True)
class FoundRouter:
    """Describes a module whose `method` chooses `top_k` of `num_experts` experts for each token."""

    layer: int  # the absolute id of its decoder layer
    name: str  # its path in the model
    module: nn.Module
    method: str
    num_experts: int
    top_k: int
    choice: Choice
    ordered: bool  # the order of the slots has a meaning
    num_groups: int = 1  # of experts; 1 if they are not grouped


@dataclasses.dataclass(frozen=True)
class Found:
    """Holds the routers of one decoder stack, and `left_live`: the (name, reason) of each router that stays live."""

    stack: nn.Module
    stack_name: str
    routers: tuple[FoundRouter, ...]
    num_layers: int | None  # decoder layers, dense ones included
    left_live: tuple[tuple[str, str], ...]

    @property
    def spec(self) -> RouterSpec:
        """The RouterSpec of these routers. Raises ReplayError if layers differ in experts or top-k."""
        first = self.routers[0]
        for router in self.routers:
            if (router.num_experts, router.top_k) != (first.num_experts, first.top_k):
                raise ReplayError(
                    f"all layers must choose the same number of experts, since one RouterSpec describes all of them: "
                    f"layer {first.layer} chooses {first.top_k} of {first.num_experts}, layer {router.layer} "
                    f"{router.top_k} of {router.num_experts}"
                )
        return RouterSpec(
            num_experts=first.num_experts,
            top_k=first.top_k,
            layers=tuple(router.layer for router in self.routers),
            ordered=first.ordered,
            num_layers=self.num_layers,
        )


def find_routers(model: nn.Module) -> Found:
    """Return the routers of the text decoder of `model`; raise ReplayError with the reason if there are none."""
    modules = dict(model.named_modules())
    _refuse_older(modules)
    named = _named_routers(model, modules)
    if not named:
        raise ReplayError(
            f"{type(model).__name__} has no router that Router Replay can find: expected a transformers MoE model with "
            'a module of a class in its _can_record_outputs["router_logits"]'
        )
    by_stack: dict[str, list[str]] = {}
    for name in named:
        by_stack.setdefault(_stack_of(name, modules), []).append(name)
    stack_name, left_live = _decoder_stack(by_stack, type(model).__name__)
    routers = []
    for name in by_stack[stack_name]:
        reason = not_decoder(name)
        if reason:
            left_live.append((name, reason))
        else:
            routers.append(_describe(name, named[name], modules, stack_name))
    _refuse_tied(model, routers)
    routers.sort(key=_call_order)
    if not routers:
        raise ReplayError(f"{type(model).__name__} has no router in its text decoder; routers elsewhere: {left_live}")
    depth = _depth(routers, modules, stack_name)
    return Found(modules[stack_name], stack_name, tuple(routers), depth, tuple(left_live))


def _refuse_older(modules: dict[str, nn.Module]) -> None:
    """Raise ReplayError if the model is of a family that replays with a newer transformers only."""
    for module in modules.values():
        family = by_class(type(module)).name if isinstance(module, PreTrainedModel) else ""
        known = measured.FAMILIES.get(family)
        if known is not None and is_older(known.since):
            raise ReplayError(
                f"{type(module).__name__} is of the family {family}, whose routes can be replayed with transformers "
                f"{known.since} or newer; {installed()} is installed: "
                f'pip install "transformers>={known.since}"'
            )


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the model's parameters.

    None means that the model has no parameters now: they are flat parameters of an outer module, or offloaded.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None)


def _named_routers(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, Where]:
    """Return, by name, every module of a class that the family names as its router."""
    targets: dict[tuple[type, str | None], Where] = {}
    for module in modules.values():
        if not isinstance(module, PreTrainedModel):
            continue
        recorders = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits") or []
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            if not isinstance(recorder, type):  # older versions name a class alone, which is not the one that chooses
                targets[recorder.target_class, recorder.layer_name] = where_router(recorder.target_class.__name__)
    found: dict[str, Where] = {}
    for name, module in modules.items():
        for (target, suffix), where in targets.items():
            if isinstance(module, target) and (suffix is None or _plain(name).endswith(suffix)) and not where.skip:
                found[name] = where
    return found


def _plain(name: str) -> str:
    """Return the name that the module has in the model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _chooser(name: str, where: Where, modules: dict[str, nn.Module]) -> str:
    """Return the name of the module that chooses, given the name of the module that the family names as its router."""
    if where.parent:
        while name.rsplit(".", 1)[-1] in WRAPPER_PARTS:
            name = name.rsplit(".", 1)[0]
        return name.rsplit(".", 1)[0]
    for part in where.child.split(".") if where.child else ():
        name = f"{name}.{part}"
        while inside := [f"{name}.{wrapper}" for wrapper in WRAPPER_PARTS if f"{name}.{wrapper}" in modules]:
            name = inside[0]
    return name


def _stack_of(name: str, modules: dict[str, nn.Module]) -> str:
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        above = ".".join(parts[:end])
        if isinstance(modules.get(above), PreTrainedModel):
            return above
    return ""


def not_decoder(path: str) -> str | None:
    """Return why a module with this path is not part of the text decoder; None if it may be."""
    parts = path.lower().split(".")
    return next(
        (reason for word, reason in NOT_DECODER.items() if any(word in part for part in parts)),
        None,
    )


def _decoder_stack(by_stack: dict[str, list[str]], model: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the one stack that decodes text, and the (name, reason) of the routers of all other stacks.

    Those other routers stay live. Raises ReplayError if it is not clear which stack decodes text.
    """
    left_live: list[tuple[str, str]] = []
    reasons = {stack: not_decoder(stack) for stack in by_stack} if len(by_stack) > 1 else {}
    candidates = [stack for stack in by_stack if not reasons.get(stack)]
    decoders = [stack for stack in candidates if "encoder" not in stack.lower().split(".")]
    if len(candidates) > 1 and decoders:
        reasons.update({stack: ENCODER for stack in candidates if stack not in decoders})
        candidates = decoders
    if len(candidates) != 1:
        raise ReplayError(
            f"{model} has {len(by_stack)} stacks with routers ({', '.join(map(repr, by_stack))}), and it is not clear "
            "which one decodes text: pass that submodule to RouterReplay"
        )
    for stack, names in by_stack.items():
        if stack != candidates[0]:
            left_live.extend((name, reasons[stack] or "") for name in names)
    return candidates[0], left_live


def _describe(name: str, where: Where, modules: dict[str, nn.Module], stack_name: str) -> FoundRouter:
    name = _chooser(name, where, modules)
    module = modules[name]
    family = by_class(type(module))
    groups = getattr(module, "num_group", None)
    grouped = family.choice is Choice.TOP_K and isinstance(groups, int)
    num_experts, top_k = sizes_of(name, module)
    return FoundRouter(
        layer=_layer_of(name, stack_name),
        name=name,
        module=module,
        method=where.method,
        num_experts=num_experts,
        top_k=top_k,
        choice=Choice.GROUPED if grouped else family.choice,
        ordered=family.ordered,
        num_groups=groups if isinstance(groups, int) else 1,
    )


def sizes_of(name: str, module: nn.Module) -> tuple[int, int]:
    """Return the number of experts and the top-k of a router `module`; `name` is for the error if it has none."""
    num_experts = _number(name, module, WIDTH_ATTRIBUTES, CONFIG_WIDTH, "number of experts")
    return num_experts, by_class(type(module)).top_k or _number(name, module, TOP_K_ATTRIBUTES, CONFIG_TOP_K, "top-k")


def _layer_of(name: str, stack_name: str) -> int:
    below = name.removeprefix(f"{stack_name}." if stack_name else "")
    layer = next((int(part) for part in below.split(".") if part.isdigit()), None)
    if layer is None:
        raise ReplayError(
            f"the router {name} is outside the layers of {stack_name or 'the model'}: expected a layer id in its path"
        )
    return layer


def _depth(routers: list[FoundRouter], modules: dict[str, nn.Module], stack_name: str) -> int | None:
    """Return the length of the list of layers; None if it is not a list (a pipeline stage has a dict)."""
    last = routers[-1]
    before, _, _ = last.name[len(stack_name) :].partition(f".{last.layer}.")
    layers = modules.get((stack_name + before).removeprefix("."))
    return len(layers) if isinstance(layers, nn.ModuleList) and len(layers) > last.layer else None


def _number(name: str, module: nn.Module, attributes: tuple[str, ...], fields: tuple[str, ...], what: str) -> int:
    sources: list[tuple[Any, tuple[str, ...]]] = [(module, attributes), (getattr(module, "config", None), fields)]
    sources.append((getattr(module, "experts", None), attributes))  # dbrx counts its experts only there
    for owner, names in sources:
        for attribute in names:
            value = getattr(owner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise ReplayError(
        f"{name} ({type(module).__name__}) has no attribute for its {what}: expected one of {', '.join(attributes)}"
    )


def _refuse_tied(model: nn.Module, routers: list[FoundRouter]) -> None:
    """Raise ReplayError if two layers share one router module: its calls do not show which layer made them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[int, set[int]] = {id(router.module): set() for router in routers}
    for name, module in modules.items():
        if id(module) in layers:
            layers[id(module)].add(_layer_of(name, _stack_of(name, modules)))
    for router in routers:
        if len(layers[id(router.module)]) > 1:
            raise ReplayError(
                f"layers {sorted(layers[id(router.module)])} share one router module ({router.name}): its calls do not "
                "show which layer made them, so their routes cannot be replayed"
            )


def _call_order(router: FoundRouter) -> tuple[int, int]:
    parts = router.name.split(".")
    return router.layer, next((i for i, part in enumerate(CALL_ORDER) if part in parts), len(parts))
