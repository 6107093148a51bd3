"""Provide the weight-transfer backend "router_replay" for vLLM's own weight-update calls, from disk or shared memory.

    vllm serve MODEL --weight-transfer-config '{"backend": "router_replay"}'       # ROUTER_REPLAY_VLLM=1
    POST /pause, /start_weight_update
    POST /update_weights    {"update_info": {"path": "/checkpoints/12"}}           # sources.py has the other form
    POST /finish_weight_update, /reset_prefix_cache, /resume

`/update_weights` opens and checks the weights in every worker and changes nothing; `/finish_weight_update` loads them.
So if one worker refuses the weights, none loads them, and a new `/start_weight_update` begins again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from router_replay.engines.vllm.plugin.weights.loader import WeightLoader
from router_replay.engines.vllm.plugin.weights.sources import Weights
from router_replay.errors import EngineError


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """Carry no settings: calling `/init_weight_transfer_engine` is allowed but not required."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Name the source of the new weights; exactly one of the fields must be given."""

    path: str | None = None
    shared: dict[str, Any] | None = None
    cuda: dict[str, Any] | None = None

    def source(self) -> dict[str, Any]:
        """Return the field that was given, in the form that `open_source` takes."""
        return {name: value for name, value in vars(self).items() if value is not None}


class RouterReplayTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receive a whole checkpoint per `update_weights` call; a second call in the same session replaces the first."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    loader: WeightLoader  # the worker's loader, set when its model is loaded
    _opened: Weights | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Begin an update, and forget weights of an update that was not finished."""
        self._opened = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Open and check the weights, and change nothing."""
        # vLLM's own version waits for an accelerator here, which raises if there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Open and check the weights, and keep them for `finish_weight_update`."""
        self._opened = None
        self._opened = self.loader.open(update_info.source())

    def finish_weight_update(self) -> None:
        """Load the weights that the last `update_weights` opened."""
        opened, self._opened = self._opened, None
        if opened is None:
            raise EngineError(
                "finish_weight_update was called without update_weights before it: the weights were not changed"
            )
        self.loader.load(opened)

    def shutdown(self) -> None:
        """Forget weights that were opened and not loaded."""
        self._opened = None

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Raise EngineError: vLLM's interface up to about 0.26 needs this method, and no trainer calls it here."""
        raise EngineError(
            "trainer_send_weights is not supported: share the weights with router_replay.engines.vllm.weights.share"
        )
