"""Measure what delivering captured rows costs vLLM's Python per decode step: off, vLLM's own, and packed.

    python -m bench.delivery                      # 256 requests, 16 layers, 8 of 128 experts

vLLM's own scheduler, messages and output processor run without a model, so no GPU is needed. On a GPU, this work must
fit between two steps. The modes take turns step by step; the figures are lower quartiles of CPU time.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}

import numpy as np
import torch
from transformers import Qwen3MoeConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from router_replay.engines.vllm.plugin.routes import delivery

MODES = ("capture off", "vLLM's own", "rows packed", "packed")  # the last packs log-probs too, as our plugin does
PHASES = ("schedule", "update", "encode", "decode", "process")
BLOCK, PROMPT, TOP_K = 16, 512, 8
LIMIT = 1.0


class Core:
    """Hold an engine core with running requests, and the reader of its messages."""

    def __init__(self, mode: str, model: str, layers: int, requests: int, steps: int) -> None:
        self.captures, self.layers = mode != "capture off", layers
        self.milliseconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.frames = 0
        os.environ[delivery.ENVIRONMENT] = str(os.getppid()) if "packed" in mode else "0"
        config = EngineArgs(
            model=model, enable_return_routed_experts=self.captures, max_model_len=4096, max_num_seqs=requests,
            block_size=32, skip_tokenizer_init=True, max_num_batched_tokens=PROMPT * requests, enforce_eager=True,
        ).create_engine_config()  # fmt: skip
        blocks = requests * ((PROMPT + steps + 40) // BLOCK + 2) + 10
        config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK, blocks
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["attention"], attention)])
        self.scheduler = AsyncScheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        if mode == "rows packed":
            self.scheduler.update_from_output.__self__._logprobs_of = lambda *_: None
        self.encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.decode = delivery._unpacking(decoder.decode) if "packed" in mode else decoder.decode
        self.processor = OutputProcessor(None, log_stats=False)
        self.random = np.random.default_rng(0)
        hasher = get_request_block_hasher(BLOCK, sha256)
        for number in range(requests):
            self._submit(f"rr-{number:032x}", steps, hasher)

    def _submit(self, name: str, steps: int, hasher: Any) -> None:
        sampling = SamplingParams(
            max_tokens=steps + 30, ignore_eos=True, logprobs=0, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        request = EngineCoreRequest(
            request_id=f"{name}-x", prompt_token_ids=self.random.integers(3, 100, PROMPT).tolist(), mm_features=None,
            sampling_params=sampling, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt="v",
            data_parallel_rank=None,
        )  # fmt: skip
        request.external_req_id = name
        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, hasher))

    def step(self) -> None:
        clock = time.thread_time
        times = [clock()]
        scheduled = self.scheduler.schedule()
        times.append(clock())
        output = self._model_output(scheduled)
        begin = clock()
        outputs = self.scheduler.update_from_output(scheduled, output)
        times.append(clock() - begin + times[-1])
        begin = clock()
        frames = self.encoder.encode(outputs[0])
        times.append(clock() - begin + times[-1])
        received = [bytes(frame) for frame in frames]
        begin = clock()
        message = self.decode(received)
        times.append(clock() - begin + times[-1])
        begin = clock()
        self.processor.process_outputs(message.outputs)
        times.append(clock() - begin + times[-1])
        self.frames = len(frames)
        for phase, earlier, later in zip(PHASES, times, times[1:], strict=False):
            self.milliseconds[phase].append((later - earlier) * 1e3)

    def _model_output(self, scheduled: Any) -> Any:
        names = list(scheduled.num_scheduled_tokens)
        rows = None
        if self.captures:
            ids = self.random.integers(0, 128, (scheduled.total_num_scheduled_tokens, self.layers, TOP_K))
            slots = np.concatenate([self._slots(name, scheduled.num_scheduled_tokens[name]) for name in names])
            rows = RoutedExpertsLists(ids.astype(np.int32), slots)
        count = len(names)
        tokens, logprobs = np.full((count, 1), 5, np.int32), np.full((count, 1), -0.1, np.float32)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=[[5] for _ in names],
            logprobs=LogprobsLists(tokens, logprobs, np.zeros(count, np.int32), None),
            routed_experts=rows,
        )

    def _slots(self, name: str, tokens: int) -> np.ndarray:
        end = self.scheduler.requests[name].num_computed_tokens
        positions = np.arange(end - tokens, end)
        blocks = np.array(self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()[0])
        return blocks[positions // BLOCK] * BLOCK + positions % BLOCK


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    delivery.install()
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        config = Qwen3MoeConfig(
            hidden_size=32, moe_intermediate_size=32, num_hidden_layers=arguments.layers, num_attention_heads=1,
            num_key_value_heads=1, head_dim=32, num_experts=128, num_experts_per_tok=TOP_K, vocab_size=128,
            intermediate_size=32, max_position_embeddings=8192, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
        config.save_pretrained(model)
        cores = {mode: Core(mode, model, arguments.layers, arguments.requests, arguments.steps) for mode in MODES}
    for core in cores.values():
        for _ in range(3):  # prefill
            core.step()
        core.milliseconds = {phase: [] for phase in PHASES}
    gc.collect()
    gc.freeze()
    order = list(cores.values())
    for _ in range(arguments.steps):
        random.shuffle(order)
        for core in order:
            core.step()
    return show(cores, arguments)


def show(cores: dict[str, Core], arguments: argparse.Namespace) -> int:
    print(f"\nA decode step of {arguments.requests} requests, {arguments.layers} layers: milliseconds of CPU\n")
    print("| mode | " + " | ".join(PHASES) + " | engine core | front end | frames | engine core to off |")
    print("| --- |" + " ---: |" * (len(PHASES) + 4))
    totals = {}
    for mode, core in cores.items():
        quartile = {phase: float(np.quantile(taken, 0.25)) for phase, taken in core.milliseconds.items()}
        inside = quartile["schedule"] + quartile["update"] + quartile["encode"]
        totals[mode] = inside
        cells = [f"{value:.2f}" for value in (*quartile.values(), inside, quartile["decode"] + quartile["process"])]
        print(f"| {mode} | {' | '.join(cells)} | {core.frames} | {inside / totals['capture off']:.2f}x |")
    ratio = totals["packed"] / totals["capture off"]
    print(
        f"\npacked delivery takes {ratio:.3f}x of capture off (limit {LIMIT}x): {'ok' if ratio <= LIMIT else 'MISSED'}"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
