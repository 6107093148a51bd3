"""The weight-transfer backend "router_replay": vLLM's own calls for new weights, from a disk or from shared memory.

    vllm serve MODEL --weight-transfer-config '{"backend": "router_replay"}'       # ROUTER_REPLAY_VLLM=1
    POST /pause, /start_weight_update
    POST /update_weights    {"update_info": {"path": "/checkpoints/12"}}           # sources.py has the other form
    POST /finish_weight_update, /reset_prefix_cache, /resume

`/update_weights` opens and checks, in every worker, and changes nothing; `/finish_weight_update` loads. So weights
that one worker refuses are loaded by none, and a new `/start_weight_update` begins afresh.
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
    """Nothing to agree on: `/init_weight_transfer_engine` may be called, and need not be."""


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Exactly one of the two."""

    path: str | None = None
    shared: dict[str, Any] | None = None

    def source(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class RouterReplayTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One call of `update_weights` brings a whole checkpoint; a second one in the same session replaces it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    loader: WeightLoader  # the worker's, given when its model is loaded
    _opened: Weights | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._opened = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for an accelerator here, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._opened = None
        self._opened = self.loader.open(update_info.source())

    def finish_weight_update(self) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            raise EngineError("finish_weight_update without update_weights: no weights came, the old ones stay")
        self.loader.load(opened)

    def shutdown(self) -> None:
        self._opened = None

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Part of the interface up to vLLM 0.26 or so; the trainer's side here is engines.vllm.weights.share."""
        raise EngineError("trainers send weights to this backend by router_replay.engines.vllm.weights.share")
