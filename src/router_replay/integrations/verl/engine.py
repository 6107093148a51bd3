"""verl's FSDP engine with R2 and R3. Shapes as in fields.py.

R3   every pass of the actor replays `routed_experts` of the rollout
R2   `compute_log_prob` records and returns `routed_experts`, and `update_actor` replays them
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from router_replay.errors import ReplayError
from router_replay.integrations.routing import RoutingSums
from router_replay.integrations.verl import support
from router_replay.integrations.verl.fields import FIELD, PADDING, MicroBatchRoutes, over_all_layers, width_of
from router_replay.replay import RouterReplay
from router_replay.replay.replayable import Recorded
from router_replay.replay.stats import Stats
from router_replay.run_files import PER_LAYER

_REMEDY = {
    "R3": "set actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    "R2": "compute_log_prob must run first, and algorithm.rollout_correction.bypass_mode=True skips it",
}


def register() -> None:
    """Register the engine under keys that verl looks up before its own, which have no vendor."""
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], "cuda", list(support.VENDORS))(
        FSDPEngineWithRouterReplay
    )


class FSDPEngineWithRouterReplay(FSDPEngineWithLMHead):
    """FSDPEngineWithLMHead that replays or records if `router_replay.mode` is R2 or R3, and is unchanged otherwise."""

    replayer: RouterReplay | None = None
    _adapter_off = False  # the reference policy of LoRA: it routes live and leaves no record
    _recording: tuple[Recorded, np.ndarray] | None = None  # of the pass of R2 that runs now, and the token of each slot

    def initialize(self) -> None:
        """Build the model, and attach a RouterReplay to it if replay is asked for."""
        super().initialize()
        self.replay_mode = support.mode_of(self.engine_config)
        if self.replay_mode == "disabled":
            return
        self.replayer = RouterReplay(self.module)
        width_of(self.replayer.spec)
        self._routing, self._updates = RoutingSums(self.replayer.spec), 0
        if self.rank == 0:
            # printed, because verl's workers log from WARNING on, and Ray shows what they print
            print(f"[router_replay] {self.replay_mode} on {self.replayer}", flush=True)  # noqa: T201

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Switch the adapters of LoRA off, and replay with them."""
        self._adapter_off = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._adapter_off = False

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Run a mini-batch, and add the counts of its rows to the metrics, and those of the routers in an update."""
        if self.replayer is None or self._adapter_off:
            return super().forward_backward_batch(data, loss_function, forward_only)
        before = self.replayer.stats
        output = super().forward_backward_batch(data, loss_function, forward_only)
        passed = self.replayer.stats.since(before)
        output["metrics"]["routes/replayed"] = [passed.rows_replayed[0]]
        output["metrics"]["routes/live"] = [passed.rows_live[0]]
        if not forward_only:  # verl drops the metrics of the other passes
            output["metrics"] |= self._routing_metrics(passed)
        return output

    def _routing_metrics(self, passed: Stats) -> dict[str, list[float]]:
        """Return the routing metrics of a mini-batch of all ranks, whose counts on this rank are `passed`.

        verl logs the mean over mini-batches, so lists and the ids of layers are left out.
        """
        self._updates += 1
        sums = self._routing.sums(passed).to(get_device_id())
        torch.distributed.all_reduce(sums)  # over the ranks of Ulysses too: each slot is on one rank
        self._routing.add(sums)
        values, warnings = self._routing.take(self._updates)
        if self.rank == 0:
            for warning in warnings:
                print(f"[router_replay] {warning}", flush=True)  # noqa: T201
        return {name: [value] for name, value in values.items() if not name.endswith((PER_LAYER, "_layer"))}

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any], forward_only: bool) -> Any:
        """Run a micro-batch in a block of its own. What its backward recomputes uses the routes of this forward."""
        if self.replayer is None or self._adapter_off:
            return super().forward_step(micro_batch, loss_function, forward_only)
        # the micro-batch is still on the host here
        routes = MicroBatchRoutes.read(micro_batch, self.replayer.spec)
        token_S = self._tokens_of_pass(micro_batch)
        if self.replay_mode == "R2" and forward_only:
            block = self._records(self.replayer, routes, token_S)
        else:
            block = self._replays(self.replayer, routes, token_S, measured=not forward_only)
        with block:
            return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """Return what verl returns, and in the recording pass of R2 the routes in the layout of the log-probs."""
        model_output = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if self._recording is not None:
            recorded, token_S = self._recording
            ids = over_all_layers(recorded.tensors.ids, recorded.tensors.spec)
            if "pad_size" in output_args:  # packed; as bytes, because NCCL gathers no int16 over Ulysses ranks
                ids = self._gather_and_unpad_packed(ids.view(torch.uint8), output_args["pad_size"]).view(torch.int16)
            else:
                ids = ids[torch.from_numpy(token_S != PADDING).to(ids.device)]
            model_output[FIELD] = torch.nested.nested_tensor_from_jagged(ids, micro_batch["input_ids"].offsets())
        return model_output

    # -- private ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _records(self, replayer: RouterReplay, routes: MicroBatchRoutes | None, token_S: np.ndarray) -> Iterator[None]:
        if routes is not None:
            raise ReplayError(
                f"R2 records {FIELD} in this pass, but the batch has them already: set "
                "rollout.enable_rollout_routing_replay=False, which belongs to R3"
            )
        with replayer.record() as recorded:
            self._recording = recorded, token_S
            try:
                yield
            finally:
                self._recording = None

    @contextlib.contextmanager
    def _replays(
        self, replayer: RouterReplay, routes: MicroBatchRoutes | None, token_S: np.ndarray, *, measured: bool
    ) -> Iterator[None]:
        if routes is None:
            raise ReplayError(
                f"{self.replay_mode} replays {FIELD}, but the batch has none: {_REMEDY[self.replay_mode]}"
            )
        rows, loss, idle = routes.of_pass(token_S)
        if rows.any_captured:
            counted = torch.from_numpy(~idle).to(get_device_id())
            gauge = replayer.measure(self._routing.gauge, counted) if measured else contextlib.nullcontext()
            agreement = measured and self.replay_mode == "R3"  # with R2 there is no engine to agree with
            with gauge, replayer.replay(rows, loss_mask=loss, idle=idle, agreement=agreement):
                yield
        elif loss.any():
            raise ReplayError(f"{int(loss.sum())} tokens of a micro-batch bear loss, and none has a row in {FIELD}")
        else:  # sequences that verl adds to fill a batch
            yield

    def _tokens_of_pass(self, micro_batch: Any) -> np.ndarray:
        """Return which token each slot of this rank's pass holds, -1 for padding.

        verl lays the numbers of the tokens out instead of the tokens, so rows and tokens are laid out by the same code.
        """
        input_ids = micro_batch["input_ids"]
        numbers = torch.arange(1, len(input_ids.values()) + 1, device=input_ids.device)  # 0 is what verl pads with
        numbered = micro_batch.exclude("multi_modal_inputs", FIELD)
        numbered["input_ids"] = torch.nested.nested_tensor_from_jagged(numbers, input_ids.offsets())
        tensordict_utils.assign_non_tensor(numbered, pad_token_id=0)
        inputs, _ = super().prepare_model_inputs(numbered)
        return inputs["input_ids"].reshape(-1).cpu().numpy() - 1
