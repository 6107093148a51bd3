"""Write new weights straight into the tensors of a running vLLM model, where it is known and checked how.

vLLM's loaders only copy: rows of q, k and v into `qkv_proj`, an expert's matrices into its slice of `w13_weight`, of
everything the share of this rank. Here they run once on stand-ins without storage, and each copy is noted: which
rectangle of which tensor of the checkpoint goes to which rectangle of which parameter. After an update by vLLM's own
loader, the running parameters are compared with what these copies would write. Later updates make the copies of the
layers in which all values were equal to the bit.

A layer whose kernel keeps its weights in another layout, such as the packed weights of vLLM's kernels for CPUs, is not
equal, and vLLM's loader remains responsible for it. So it does for layers that compute something else from their
weights; only the classes in `COPYING` are known not to.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from router_replay.engines.copies import Move, View, joined
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.plugin.weights.fitting import stand_ins
from router_replay.engines.vllm.plugin.weights.sources import Index, Memory, Weights
from router_replay.errors import EngineError

# What a layer may do with its weights after they are loaded: these methods use them as they are, except on CPUs.
COPYING = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
ATTENTION = "Attention"  # it derives nothing from the weights of other layers; attention with latents does
CONSTANT = ("fill_", "zero_")  # a loader sets padding to a constant, which stays


@dataclasses.dataclass(frozen=True)
class Copy:
    """The rectangle `given` of the checkpoint's tensor `name` goes to the rectangle `place` of a parameter."""

    name: str
    given: View
    parameter: str
    place: View


_Joined: TypeAlias = tuple[torch.dtype, str, Move]  # what the memory is seen as, the parameter, and the copy


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checked `copies` for weights with this `index`, and the layers that vLLM's loader must load.

    `remaining` are the names of the checkpoint that these layers need, and `reasons` say why, by layer.
    """

    index: Index
    copies: list[Copy]
    remaining: frozenset[str]
    reasons: dict[str, str]
    _joined: list[tuple[dict[str, int], list[_Joined]]] = dataclasses.field(
        default_factory=list, compare=False, repr=False
    )

    @property
    def parameters(self) -> int:
        """The number of parameters that are written directly."""
        return len({copy.parameter for copy in self.copies})

    def fits(self, weights: Weights) -> bool:
        """Return whether `weights` have the names, shapes and dtypes of the plan."""
        return self.index == weights.index

    @torch.no_grad()
    def write(self, model: Any, weights: Weights) -> int:
        """Make all copies, and return the number of calls that it took.

        If the weights lie in one memory, the copies of all experts of a layer are one call.
        """
        live = _tensors(model)
        if weights.memory is None:
            for name, copies in _by_name(self.copies).items():
                tensor = weights.read(name)
                for copy in copies:
                    Move(copy.given, copy.place).make(tensor, live[copy.parameter].data)
            return len(self.copies)
        moves = self._moves(weights.memory, live)
        for dtype, parameter, move in moves:
            move.make(weights.memory.seen_as(dtype), live[parameter].data)
        return len(moves)

    def _moves(self, memory: Memory, live: Mapping[str, torch.Tensor]) -> list[_Joined]:
        """Return the joined copies from this memory. A trainer shares the same memory for all versions."""
        if not self._joined or self._joined[0][0] != memory.offsets:
            self._joined[:] = [(memory.offsets, _joined_copies(self, memory, live))]
        return self._joined[0][1]

    def rest(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that vLLM's loader must load."""
        return ((name, weights.read(name)) for name in weights.index if name in self.remaining)


def _joined_copies(plan: Plan, memory: Memory, live: Mapping[str, torch.Tensor]) -> list[_Joined]:
    """Return the copies from one memory, joined where their places are not written twice."""
    apart: dict[tuple[torch.dtype, str], list[Move]] = {}
    places = collections.Counter(_start(copy, live) for copy in plan.copies)
    in_order: list[_Joined] = []
    for copy in plan.copies:
        dtype = plan.index[copy.name][0]
        move = Move(copy.given.moved(memory.offsets[copy.name] // dtype.itemsize), copy.place)
        if places[_start(copy, live)] > 1:  # tied weights that the checkpoint has twice: the last one is right
            in_order.append((dtype, copy.parameter, move))
        else:
            apart.setdefault((dtype, copy.parameter), []).append(move)
    return [(*key, move) for key, moves in apart.items() for move in joined(moves)] + in_order


def _start(copy: Copy, live: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    tensor = live[copy.parameter]
    return _storage(tensor), tensor.storage_offset() + copy.place.offset


@torch.no_grad()
def plan_for(model: Any, weights: Weights) -> Plan:
    """Return the plan for later weights like `weights`, which vLLM's own loader has just loaded into `model`.

    Raises EngineError with the reason if there is no plan.
    """
    if problems := seams.problems("direct"):
        raise EngineError("; ".join(problems))
    for module in model.modules():
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ not in (ATTENTION, *COPYING):
            raise EngineError(f"{type(module).__name__} computes something from the weights of other layers")
    copies = copies_of(model, weights.index)
    live, reasons = _tensors(model), {}
    users = users_of(model)
    for layer, own in _by_layer(copies).items():
        storages = {_storage(live[copy.parameter]) for copy in own if copy.parameter in live}
        modules = {id(one): one for storage in storages for one in users[storage]} | {0: model.get_submodule(layer)}
        packed = (_why_packed(one) for one in modules.values())
        if reason := next(filter(None, packed), "") or _why_unlike(own, live, weights):
            reasons[layer] = reason
    remaining = frozenset(copy.name for copy in copies if _layer_of(copy.parameter) in reasons)
    direct = [copy for copy in copies if _layer_of(copy.parameter) not in reasons]
    if not direct:
        raise EngineError(f"in all layers: {next(iter(reasons.values()), 'there is nothing to copy')}")
    return Plan(weights.index, direct, remaining, reasons)


def copies_of(model: Any, index: Index) -> list[Copy]:
    """Return every copy that vLLM's loaders would make of weights with this `index`, on this rank.

    Raises EngineError if a loader does anything but copy.
    """
    given = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in index.items()}
    with stand_ins(model, collections.Counter()) as parameters, _Noting(given, parameters) as noting:
        try:
            model.load_weights(iter(given.items()))
        except EngineError:
            raise
        except Exception as error:  # a loader that looks at values, which stand-ins do not have
            raise EngineError(
                f"its loaders need more than names and shapes ({type(error).__name__}: {error})"
            ) from error
    return noting.copies


class _Noting(TorchDispatchMode):
    """Note each copy from a tensor of `given` into one of `parameters`, and refuse other changes of these."""

    def __init__(self, given: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._given = {_storage(tensor): name for name, tensor in given.items()}
        self._parameters = {_storage(tensor): name for name, tensor in parameters.items()}
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else None
        parameter = None if written is None else self._parameters.get(_storage(written))
        if parameter is not None and written is not None:
            self._note(func, written, parameter, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, written: torch.Tensor, parameter: str, args: Any) -> None:
        operation = func._schema.name.partition("::")[2]
        if operation in CONSTANT:
            return
        source: Any = args[1] if operation == "copy_" else None
        name = None if source is None else self._given.get(_storage(source))
        if name is None or written.shape != source.shape:
            raise EngineError(f"the loader of {parameter} computes its values ({operation})")
        self.copies.append(Copy(name, View.of(source), parameter, View.of(written)))


def _why_packed(module: Any) -> str:
    """Return why writing into the parameters that a module uses would not be enough, or an empty text."""
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in COPYING:
        return f"{type(method).__name__} may keep its weights in another form"
    return "its kernel for CPUs holds packed weights" if holds_packed_weights(module) else ""


def holds_packed_weights(module: Any) -> bool:
    """Return whether a layer computes with a packed copy of its weights.

    On CPUs a linear layer calls a function. If that holds something, it is the packed weights.
    """
    return bool(getattr(getattr(module, "cpu_linear", None), "__closure__", None))


def users_of(model: Any) -> dict[int, list[Any]]:
    """Return the modules that use each storage: tied weights have several."""
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for module in model.modules():
        for tensor in _own_tensors(module).values():
            found[_storage(tensor)].append(module)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _why_unlike(copies: list[Copy], live: Mapping[str, torch.Tensor], weights: Weights) -> str:
    """Return which running parameter is not what the copies would write, or an empty text."""
    for copy in copies:
        tensor, name = live.get(copy.parameter), copy.parameter.rpartition(".")[2]
        if tensor is None:
            return f"its {name} does not exist any more"
        last = sum((size - 1) * stride for size, stride in zip(copy.place.shape, copy.place.stride, strict=True))
        if not tensor.is_contiguous() or copy.place.offset + last >= tensor.numel():
            return f"its {name} has another layout in the kernel"
        expected = copy.given.on(weights.read(copy.name)).to(device=tensor.device, dtype=tensor.dtype)
        if not torch.equal(_bits(copy.place.on(tensor.data)), _bits(expected)):
            return f"its {name} has another layout in the kernel"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in which every NaN and zero equals itself only."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        for name, tensor in _own_tensors(module).items()
    }


def _own_tensors(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _by_layer(copies: list[Copy]) -> dict[str, list[Copy]]:
    found: dict[str, list[Copy]] = {}
    for copy in copies:
        found.setdefault(_layer_of(copy.parameter), []).append(copy)
    return found


def _by_name(copies: list[Copy]) -> dict[str, list[Copy]]:
    found: dict[str, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.name, []).append(copy)
    return found
