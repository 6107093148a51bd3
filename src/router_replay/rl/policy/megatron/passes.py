"""Run the schedules of Megatron over a mini-batch: log-probs of every label, with or without a backward pass.

A micro-batch is a block of rows [rows, length], one sequence per row: Megatron's own attention takes no packed
sequences. All micro-batches of a mini-batch have one shape, which the pipeline needs. Padding is at the end of a row,
so causal attention keeps it apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from router_replay.batch import NO_LABEL, Batch, LocalBatch
from router_replay.batch.megatron import Share
from router_replay.errors import BatchError
from router_replay.replay.megatron import MegatronReplay
from router_replay.rl.policy.delivery import MiniBatch
from router_replay.rl.policy.megatron.model import Loaded
from router_replay.rl.processes.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a mini-batch: `count` micro-batches of `rows` sequences of `length` tokens each."""

    count: int
    rows: int
    length: int

    @classmethod
    def of(cls, mini: MiniBatch) -> Shape:
        """Return the shape of `mini`; raise BatchError unless all its micro-batches are equal blocks of rows."""
        found = set()
        for micro in mini.micro:
            lengths = set((micro.whole.cu_seqlens[1:] - micro.whole.cu_seqlens[:-1]).tolist())
            found |= {(len(micro.whole.cu_seqlens) - 1, length) for length in lengths}
        if len(found) != 1:
            raise BatchError(
                "a Megatron policy takes blocks of rows of one length, the same in all micro-batches, got "
                f"{sorted(found)} as (rows, length): plan the mini-batch with row_multiple"
            )
        return cls(len(mini.micro), *found.pop())

    @property
    def arguments(self) -> dict[str, Any]:
        """The shape as the arguments of Megatron's schedules and of `MegatronReplay.replay`."""
        return {"num_microbatches": self.count, "micro_batch_size": self.rows, "seq_length": self.length}


class Passes:
    """Runs `loaded`, this rank's part of a model, over mini-batches. `temperature` divides the logits.

    `replayer` is the MegatronReplay of the model.
    """

    def __init__(self, loaded: Loaded, ranks: Ranks, temperature: float) -> None:
        self._chunk, self._precision = loaded.chunk, loaded.precision
        self.replayer = MegatronReplay(loaded.chunk)
        self._ranks, self._temperature = ranks, temperature
        self._is_last = parallel_state.is_pipeline_last_stage()
        self._vocabulary = int(loaded.chunk.vocab_size)

    def logprobs(self, mini: MiniBatch) -> list[Tensor]:
        """Return the log-prob of every label of each micro-batch, [slots], on all pipeline stages."""
        shape = Shape.of(mini)
        found = torch.zeros(shape.count, shape.rows * shape.length, device=self._ranks.device)

        def keep(number: int, logprobs_T: Tensor) -> Tensor:
            found[number] = logprobs_T
            return logprobs_T.sum()

        self._chunk.eval()
        with torch.no_grad():
            self._run(mini, keep, forward_only=True)
        return list(self.from_last_stage(found))

    def backward(self, mini: MiniBatch, loss: Callable[[int, Tensor], Tensor]) -> None:
        """Add the gradients of the mini-batch to the parameters.

        The last stage calls `loss` with the number of a micro-batch and the log-probs of its labels, [slots].
        """
        self._chunk.train()
        self._run(mini, loss, forward_only=False)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Return the `values` of the last pipeline stage on all stages."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return values

    def empty_share(self, shape: Shape) -> Share:
        """Return the share of a micro-batch on a rank without routed layers."""
        return Share(None, shape.rows * shape.length // self.replayer.layout.parts, shape.rows)

    def _run(self, mini: MiniBatch, loss: Callable[[int, Tensor], Tensor], forward_only: bool) -> None:
        shape, device = Shape.of(mini), self._ranks.device
        mask = torch.ones(shape.length, shape.length, dtype=torch.bool, device=device).triu(1)[None, None]

        def step(data: Any, model: Any) -> Any:
            number, micro = next(data)
            self._ranks.watch.beat()
            tensors = micro.to_torch(device)
            tokens, positions = (
                tensors.whole(name).view(shape.rows, shape.length) for name in ("token_ids", "position_ids")
            )
            return model(tokens, positions, mask), lambda logits: self._lost(logits, number, micro, loss)

        with self._precision.computing():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(enumerate(mini.micro)),
                model=self._chunk,
                forward_only=forward_only,
                **shape.arguments,
            )

    def _lost(self, logits: Tensor, number: int, micro: LocalBatch, loss: Callable[[int, Tensor], Tensor]) -> Any:
        """Return what a schedule expects of the last stage; it divides by the number of tokens only if asked to."""
        labels = micro.whole.labels
        if labels.max() >= self._vocabulary:
            raise BatchError(f"expected labels below the vocabulary of {self._vocabulary}, got {labels.max()}")
        labels_BS = micro.to_torch(logits.device).whole("labels").view(logits.shape[:2])
        has_label = labels_BS != NO_LABEL
        # A copy: the loss of Megatron changes the logits in place.
        scaled = logits.float() / self._temperature if self._temperature != 1.0 else logits.float().clone()
        found = -vocab_parallel_cross_entropy(scaled, labels_BS.clamp(min=0))
        value = loss(number, torch.where(has_label, found, 0.0).reshape(-1))
        return value, torch.ones((), dtype=torch.int, device=logits.device), {}


def with_routes(micro: LocalBatch) -> Batch:
    """Return the micro-batch as the replayer takes it: whole, with its rows."""
    return dataclasses.replace(micro.whole, routes=micro.routes)
