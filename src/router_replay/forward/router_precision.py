"""Let the routers of a model compute in float32 while everything else computes in bfloat16.

A router's logits in bfloat16 have three significant digits, so that experts with nearly equal scores change places
between an engine and a trainer. In float32 the weights and the logits of the routers keep seven.

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    compute_routers_in_float32(model)       # converts their weights, and casts what they are given
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from router_replay.errors import ReplayError
from router_replay.families.from_modules import find_routers
from router_replay.families.records import by_class
from router_replay.families.types import YES


def routers_of_their_own(model: nn.Module) -> list[nn.Module]:
    """Return the router modules of the text decoder.

    Raises ReplayError if the model's family cannot have float32 routers beside bfloat16 experts, or nobody tried.
    """
    routers = [router.module for router in find_routers(model).routers]
    family = by_class(type(routers[0]))
    if family.float32_router != YES:
        raise ReplayError(
            f"float32 routers in {type(model).__name__}: {family.float32_router}. Leave the routers in the model's "
            'dtype: router_dtype = "model"'
        )
    return routers


def compute_routers_in_float32(model: nn.Module) -> None:
    """Convert the routers' weights to float32, and let the routers cast the tensors that they are given.

    The weights keep the values that they have now. Raises ReplayError as `routers_of_their_own` does.
    """
    for router in routers_of_their_own(model):
        router.float()
        router.register_forward_pre_hook(_in_float32, with_kwargs=True)


def _in_float32(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, (args, kwargs))
