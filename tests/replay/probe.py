"""See which experts each token really got, by looking at the experts, not at the code that chose them.

Most families hand their experts module an integer tensor [tokens, slots]; the others are looked at where they
leave a trace of the choice: a mask, a list sorted by expert, an embedding that is looked up.

Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from router_replay.families.from_modules import FoundRouter, find_routers

# family -> how the trace is turned into sets of experts. Others: "indices".
TRACES = {
    "doge": "embedding",
    "jetmoe": "sorted",
    "llama4": "scores",
    "nllb_moe": "scores",
    "switch_transformers": "mask",
    "zaya": "indices without the skip class",
}


class Probe:
    """Collects, per routed layer, the experts of every token in the passes of a `with` block."""

    def __init__(self, family: str, model: nn.Module) -> None:
        self.trace = TRACES.get(family, "indices")
        self.routers = find_routers(model).routers
        self.modules = dict(model.named_modules())
        self.seen: list[Any] = [None] * len(self.routers)
        self.inputs: list[Any] = [None] * len(self.routers)
        self.weights: list[Any] = [None] * len(self.routers)
        self.calls = 0
        self.order: list[int] = []  # columns, as the pass came to them
        self.handles: list[Any] = []

    def __enter__(self) -> Probe:
        for column, router in enumerate(self.routers):
            self._watch(column, router)
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _watch(self, column: int, router: FoundRouter) -> None:
        def keep_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.inputs[column] = (args, kwargs)

        def from_arguments(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls += 1
            self.order.append(column)
            values = [*args, *kwargs.values()]
            self.seen[column] = _indices(values)
            self.weights[column] = values[-1]

        def from_output(module: nn.Module, args: Any, out: Any) -> None:
            self.calls += 1
            self.order.append(column)
            self.seen[column] = self._sets(out, router)
            self.weights[column] = out[1] if self.trace == "mask" else out[0]

        if router.method == "forward":
            self.handles.append(router.module.register_forward_pre_hook(keep_inputs, with_kwargs=True))
        if self.trace == "embedding":
            target = self.modules[f"{router.name}.down_embed"]
            self.handles.append(target.register_forward_pre_hook(from_arguments, with_kwargs=True))
        elif self.trace.startswith("indices"):
            target = self._experts(router)
            self.handles.append(target.register_forward_pre_hook(from_arguments, with_kwargs=True))
        else:
            self.handles.append(router.module.register_forward_hook(from_output))

    def _experts(self, router: FoundRouter) -> nn.Module:
        for name in (router.name, router.name.rsplit(".", 1)[0]):
            if f"{name}.experts" in self.modules:
                return self.modules[f"{name}.experts"]
        raise AssertionError(f"no experts beside {router.name}")

    def _sets(self, out: Any, router: FoundRouter) -> np.ndarray:
        if self.trace == "sorted":  # jetmoe: (token * k + slot) sorted by expert, and how many each expert gets
            order, _, _, sizes, _ = out
            experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
            flat = torch.empty_like(experts)
            flat[order] = experts
            return flat.reshape(-1, router.top_k).numpy()
        per_expert_TE = {"scores": out[0], "mask": out[0]}[self.trace]
        if self.trace == "scores" and out[0].dtype in (
            torch.int64,
            torch.bool,
        ):  # nllb_moe: a mask of the first, then probs
            per_expert_TE = out[1]
        flat_TE = per_expert_TE.detach().reshape(-1, router.num_experts)
        return torch.stack([row.nonzero().flatten() for row in flat_TE > 0]).numpy()

    def assert_used(self, ids_TLK: np.ndarray) -> None:
        """Every token got these experts in every layer, as sets."""
        for column, router in enumerate(self.routers):
            expected = np.sort(ids_TLK[:, column].astype(np.int64), axis=-1)
            seen = np.sort(np.asarray(self.seen[column]), axis=-1)
            if self.trace == "indices without the skip class":
                expected = np.where(expected == router.num_experts - 1, 0, expected)
            assert seen.shape == expected.shape, (router.name, seen.shape, expected.shape)
            assert np.array_equal(seen, expected), router.name

    def assert_weights_count(self) -> None:
        """No chosen expert has weight zero: its scores were not masked away before they were gathered."""
        if self.trace != "indices":
            return
        for column, router in enumerate(self.routers):
            weights = self.weights[column]
            assert weights.is_floating_point(), router.name
            assert weights.numel() == self.seen[column].size, router.name
            assert bool((weights != 0).all()), router.name

    def live_choice(self) -> np.ndarray | None:
        """[T, L, K]: what each router chooses alone on the same input; None where that is not to be had."""
        if self.trace != "indices" or any(router.method != "forward" for router in self.routers):
            return None
        columns = []
        for column, router in enumerate(self.routers):
            if type(router.module).__name__ == "PhimoeTopKRouter":
                return None  # draws its experts in training
            args, kwargs = self.inputs[column]
            with torch.no_grad():
                columns.append(_indices(type(router.module).forward(router.module, *args, **kwargs)))
        return np.stack(columns, axis=1)

    def assert_live_rows(self, live_T: np.ndarray) -> None:
        """The tokens of these rows got what their routers choose by themselves."""
        alone = self.live_choice()
        if alone is not None:
            seen = np.sort(np.stack(self.seen, axis=1), axis=-1)
            assert np.array_equal(seen[live_T], np.sort(alone, axis=-1)[live_T])

    @staticmethod
    def router_weights(model: nn.Module) -> list[Tensor]:
        """The weight of every decoder router that makes its logits."""
        weights = []
        for router in find_routers(model).routers:
            names = ["router_gate.weight", "router.weight", "router.layer.weight", "weight", "classifier.weight"]
            names += ["gate.weight", "wg.weight", "proj.weight", "layer.weight", "linear.weight", "down_proj.weight"]
            parameters = dict(router.module.named_parameters())
            weights.append(next(parameters[name] for name in names if name in parameters))
        return weights


def _indices(values: Any) -> np.ndarray:
    tensor = next(value for value in values if isinstance(value, Tensor) and value.dtype == torch.int64)
    return tensor.detach().reshape(-1, tensor.shape[-1]).numpy()
