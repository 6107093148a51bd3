"""A worker extension of verl for vLLM on a CPU.

vLLM repacks the weights of a layer for its CPU kernels, and verl loads new ones into the packed tensors as it does on a
GPU, which fails. Here verl's own transport brings the weights, and the loader of our vLLM plugin takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from router_replay.engines.vllm.plugin.weights.sources import Weights


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        received: dict[str, torch.Tensor] = {}

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            received.update((name, tensor.clone()) for name, tensor in bucket)

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        index = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in received.items()}
        self.router_replay.weights.load(Weights("the weights that verl sent", index, received.__getitem__))
