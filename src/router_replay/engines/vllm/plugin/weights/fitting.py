"""Check with vLLM's own loaders whether new weights fit the running model, without touching a weight.

vLLM fuses the tensors of a checkpoint (q, k and v; all experts of a layer) and skips what it does not need, so only its
loaders know which names and shapes a model takes. Here the loaders run on stand-ins without storage and count how many
elements of each parameter were given. The checkpoint that the engine started from determines how many are required: a
missing expert is a shortfall, but a multi-token head that the trainer does not have is not.

vLLM's own reload silently fills such a shortfall with uninitialised memory.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from router_replay.engines.vllm.plugin.weights.sources import Index, Weights
from router_replay.errors import EngineError, shorten


class Fitting:
    """Check weights against the model of one worker.

    `start` is the checkpoint that the model was loaded from, or None if unknown. Without it, the first weights that
    arrive are assumed complete, and later ones are compared with them.
    """

    def __init__(self, model: Any, start: Callable[[], Weights | None]) -> None:
        self._model = model
        self._start = start
        self._looked = False
        self._index: Index = {}
        self._taken: Mapping[str, int] = {}
        self._fitting: set[int] = set()  # hashes of accepted indices: a trainer sends the same one at every step

    def check(self, weights: Weights) -> None:
        """Raise EngineError unless these weights contain everything that the model needs."""
        key = hash(frozenset(weights.index.items()))
        if key in self._fitting:
            return
        if not self._looked:
            start = self._start()
            if start is not None:
                self._index, self._taken = start.index, taken_of(self._model, start)
            self._looked = True
        self._compare(weights)
        taken = taken_of(self._model, weights)
        short = [name for name, elements in self._taken.items() if taken.get(name, 0) < elements]
        if short:
            missing = sorted(self._index.keys() - weights.index.keys())
            raise EngineError(
                f"{weights.where}: weights are missing: vLLM's {shorten(short)} would not be filled completely"
                + (
                    f"; compared with the engine's own checkpoint, these are missing: {shorten(missing)}"
                    if missing
                    else ""
                )
            )
        if not self._taken:
            self._index, self._taken = weights.index, taken
        self._fitting.add(key)

    def _compare(self, weights: Weights) -> None:
        for name in weights.index.keys() & self._index.keys():
            (dtype, shape), (usual, wanted) = weights.index[name], self._index[name]
            if shape != wanted:
                raise EngineError(f"{weights.where}: {name} has shape {list(shape)}, expected {list(wanted)}")
            if dtype != usual and not (_is_plain(dtype) and _is_plain(usual)):
                raise EngineError(f"{weights.where}: {name} is {dtype}, expected {usual}")


def taken_of(model: Any, weights: Weights) -> dict[str, int]:
    """Return how many elements of each parameter these weights would fill."""
    taken: collections.Counter[str] = collections.Counter()
    current = ""

    def noting() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current, tensor in weights:  # noqa: UP028  the current name is recorded here
            yield current, tensor

    try:
        with torch.no_grad(), stand_ins(model, taken):
            model.load_weights(noting())
    except Exception as error:
        shape = list(weights.index[current][1]) if current else []
        raise EngineError(
            f"{weights.where}: vLLM's {type(model).__name__} cannot load {current} with shape {shape}: "
            f"{type(error).__name__}: {error}. Names and shapes must be those that save_pretrained writes"
        ) from error
    return dict(taken)


@contextlib.contextmanager
def stand_ins(model: Any, taken: collections.Counter[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Replace the model's tensors with storage-free stand-ins whose loaders count elements; restore them at the end.

    Nothing runs the model meanwhile, because a worker does one thing at a time. Returns the stand-ins by name.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

    kept = [
        (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))
        for layer in model.modules()
    ]
    loaders: list[tuple[torch.Tensor, Callable[..., Any] | None]] = []
    found: dict[str, torch.Tensor] = {}
    try:
        for path, layer in model.named_modules():
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
                loaders.append((tensor, getattr(tensor, "weight_loader", None)))
                # Some tensors, such as the selection bias of a router, are never moved to meta and are live here.
                stand_in = found[f"{path}.{name}"] = tensor if tensor.is_meta else to_meta_tensor(tensor)
                tensor.weight_loader = _counting(tensor, stand_in, f"{path}.{name}", taken)
        yield found
    finally:
        for tensor, loader in reversed(loaders):
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
        for layer, parameters, buffers, passing in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)
            layer._non_persistent_buffers_set = passing


def _counting(
    tensor: torch.Tensor, stand_in: torch.Tensor, name: str, taken: collections.Counter[str]
) -> Callable[..., Any]:
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import get_numel_loaded

    loader = _get_original_loader(tensor)  # an earlier reload leaves its wrapper, which would load nothing
    signature = inspect.signature(loader)

    def count(*arguments: Any, **more: Any) -> Any:
        bound = signature.bind(*arguments, **more)
        bound.apply_defaults()
        bound.arguments["param"] = stand_in
        elements, answer = get_numel_loaded(loader, bound)
        taken[name] += elements
        return answer

    return count


def _is_plain(dtype: torch.dtype) -> bool:
    """Return whether the dtype is an unquantised float; vLLM rounds wider master weights as `Tensor.to` does."""
    return dtype.is_floating_point and dtype.itemsize >= 2
