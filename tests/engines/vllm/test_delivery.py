"""Rows that travel together, by vLLM's own scheduler, messages and output processor, without a model.

A row is made from the conversation it belongs to and its position, so what a client is given can be told right
from wrong, however vLLM came by it: in chunks, after a preemption, from the prefix cache, a step ahead.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import types
from typing import Any

import numpy as np
import pytest

from router_replay.engines import Engine
from router_replay.engines.vllm import versions
from router_replay.engines.vllm.plugin.routes import commit, delivery
from router_replay.errors import EngineError
from tests.engines.conftest import ENVIRONMENT, Checkpoints, environment
from tests.engines.vllm import aux_worker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

LAYERS, TOP_K, EXPERTS = 4, 4, 16  # of the checkpoints
BLOCK, BLOCKS = 16, 30


def rows_of(conversation: int, first: int, end: int) -> np.ndarray:
    """Any function of the three that no two tokens of this test share."""
    position = np.arange(first, end).reshape(-1, 1, 1)
    layer, slot = np.arange(LAYERS).reshape(1, -1, 1), np.arange(TOP_K)
    return ((conversation * 7919 + position * 104729 >> 3 * slot) + layer) % EXPERTS


def logprob_of(conversation: int, tokens: int) -> float:
    """Of what is sampled after so many tokens; exact in float32."""
    return -(conversation * 1024 + tokens) / 8192


class Core:
    """An engine core and its reader: real but for the model, one step ahead as vLLM is on a GPU."""

    def __init__(self, model: str, packed: bool) -> None:
        import torch
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.structured_output import StructuredOutputManager

        delivery.install()
        arguments = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32}
        runner = versions.model_runner(vllm.__version__)
        with environment(**ENVIRONMENT, **runner, **{delivery.ENVIRONMENT: str(os.getppid()) if packed else None}):
            config = EngineArgs(model, enable_return_routed_experts=True, **arguments).create_engine_config()
            config.cache_config.block_size = BLOCK
            config.cache_config.num_gpu_blocks = BLOCKS
            attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
            cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["attention"], attention)])
            self.scheduler = AsyncScheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.outputs = OutputProcessor(None, log_stats=False)
        self._conversations: dict[str, int] = {}
        self._second_runner = versions.uses_second_runner(vllm.__version__)
        if self._second_runner:
            from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

            commit.install()
            self._worker = aux_worker.storing(AuxOutputWorkerConnector, (LAYERS, TOP_K), BLOCK, 8)
        self._under_way: collections.deque[tuple[Any, Any]] = collections.deque()
        self.arrays = 0  # that were sent
        self.logprob_arrays = 0
        self.preempted = 0
        self.rows: dict[str, np.ndarray] = {}
        self.logprobs: dict[str, list[float] | None] = {}
        self.cached: dict[str, int] = {}

    def add(
        self, name: str, conversation: int, prompt: int, tokens: int, start: int = 0, logprobs: int | None = 0
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            routed_experts_prompt_start=start,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        ids = np.random.default_rng(conversation).integers(3, 100, prompt).tolist()
        request = EngineCoreRequest(name, ids, None, sampling, None, 0.0, None, None, None, external_req_id=name)
        self._conversations[name] = conversation
        self.outputs.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self._hasher))

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.preempted += len(scheduled.preempted_req_ids or ())
        if scheduled.total_num_scheduled_tokens:
            self._under_way.append((scheduled, self._compute(scheduled)))
        if len(self._under_way) > 1 or not scheduled.total_num_scheduled_tokens:
            self._read(*self._under_way.popleft())

    def _compute(self, scheduled: Any) -> Any:
        """What the worker answers. It orders requests as it likes, which is not the scheduler's order."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = sorted(scheduled.num_scheduled_tokens, key=lambda name: name[::-1])
        spans, sampled, logprobs = {}, [], []
        for name in names:
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            spans[name] = end - scheduled.num_scheduled_tokens[name], end
            sampled.append([] if request.is_prefill_chunk else [5])
            logprobs.append([logprob_of(self._conversations[name], end)])
        count = len(names)
        lists = LogprobsLists(np.full((count, 1), 5), np.asarray(logprobs, np.float32), np.ones(count, np.int64), None)
        places = {name: place for place, name in enumerate(names)}
        rows = self._rows_by_request if self._second_runner else self._rows_by_slot
        return ModelRunnerOutput(names, places, sampled, logprobs=lists, **rows(scheduled, spans, sampled))

    def _rows_by_slot(self, scheduled: Any, spans: dict[str, tuple[int, int]], sampled: list[list[int]]) -> Any:
        """What the first model runner sends: the rows of all tokens of a step, and where their KV lies."""
        from vllm.v1.outputs import RoutedExpertsLists

        rows, slots = [], []
        for name, (first, end) in spans.items():
            blocks = np.asarray(self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()[0])
            positions = np.arange(first, end)
            rows.append(rows_of(self._conversations[name], first, end))
            slots.append(blocks[positions // BLOCK] * BLOCK + positions % BLOCK)
        return {"routed_experts": RoutedExpertsLists(np.concatenate(rows).astype(np.int32), np.concatenate(slots))}

    def _rows_by_request(self, scheduled: Any, spans: dict[str, tuple[int, int]], sampled: list[list[int]]) -> Any:
        """What the second one keeps until the step is read; vLLM's own worker then returns the rows of each request."""
        rows = [rows_of(self._conversations[name], first, end).astype(np.uint8) for name, (first, end) in spans.items()]
        pending = aux_worker.begun(
            self._worker,
            scheduled.aux_output_connector_metadata,
            list(spans),
            [first for first, _ in spans.values()],
            np.cumsum([0, *map(len, rows)]),
            routed_experts=np.concatenate(rows),
            num_sampled=np.array([len(tokens) for tokens in sampled]),
            num_rejected=np.zeros(len(spans), np.int32),
        )
        return {"aux_output_connector_output": pending}

    def _read(self, scheduled: Any, answer: Any) -> None:
        if self._second_runner:
            answer.aux_output_connector_output = self._worker.process_output(answer.aux_output_connector_output)
        for message in self.scheduler.update_from_output(scheduled, answer).values():
            self.arrays += sum(output.routed_experts is not None for output in message.outputs)
            self.logprob_arrays += sum(output.new_logprobs is not None for output in message.outputs)
            received = self._decoder.decode([bytes(part) for part in self._encoder.encode(message)])
            delivery.unpack(received.outputs)
            for done in self.outputs.process_outputs(received.outputs).request_outputs:
                [choice] = done.outputs
                self.rows[done.request_id] = choice.routed_experts
                steps = None if choice.logprobs is None else list(choice.logprobs)
                self.logprobs[done.request_id] = steps and [step[5].logprob for step in steps]
                self.cached[done.request_id] = done.num_cached_tokens

    def abort(self, name: str) -> tuple[int, np.ndarray]:
        """How many tokens the reader has, and their rows."""
        from vllm.v1.request import RequestStatus

        state = self.outputs.request_states[name]
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        return len(state.detokenizer.output_token_ids), np.concatenate(state.routed_experts_chunks)


def play(core: Core, all_want_logprobs: bool) -> tuple[int, np.ndarray]:
    """Long and short prompts, two with one beginning, rows left out, too few blocks for all, one aborted."""
    core.add("long", 1, prompt=150, tokens=40)
    core.add("short", 2, prompt=5, tokens=60, logprobs=0 if all_want_logprobs else None)
    core.add("late start", 3, prompt=70, tokens=30, start=69)
    core.add("no prompt rows", 4, prompt=33, tokens=50, start=33)
    core.add("aborted", 5, prompt=40, tokens=100)
    core.add("one token", 6, prompt=20, tokens=1)
    for _ in range(20):
        core.step()
    aborted = core.abort("aborted")
    core.add("short again", 2, prompt=64, tokens=64)
    core.add("long again", 1, prompt=180, tokens=20, start=50)
    for _ in range(400):
        if not core.scheduler.has_unfinished_requests() and not core._under_way:
            break
        core.step()
    return aborted


EXPECTED = {
    "long": (1, 0, 150 + 40 - 1),
    "short": (2, 0, 5 + 60 - 1),
    "late start": (3, 69, 70 + 30 - 1),
    "no prompt rows": (4, 33, 33 + 50 - 1),
    "one token": (6, 0, 20),
    "short again": (2, 0, 64 + 64 - 1),
    "long again": (1, 50, 180 + 20 - 1),
}


PROMPTS = {
    "long": 150, "short": 5, "late start": 70, "no prompt rows": 33, "one token": 20, "short again": 64,
    "long again": 180,
}  # fmt: skip


@pytest.mark.parametrize("all_want_logprobs", [True, False])
@pytest.mark.parametrize("packed", [True, False], ids=["ours", "vLLM's own"])
def test_every_request_is_given_its_own_rows_and_logprobs(
    packed: bool, all_want_logprobs: bool, checkpoints: Checkpoints
) -> None:
    core = Core(checkpoints.a, packed)
    tokens, rows = play(core, all_want_logprobs)
    assert core.preempted
    assert core.cached["long again"] >= BLOCK
    assert tokens > 3
    np.testing.assert_array_equal(rows, rows_of(5, 0, 40 + tokens - 1))
    assert core.rows.keys() == EXPECTED.keys()
    for name, (conversation, first, end) in EXPECTED.items():
        np.testing.assert_array_equal(core.rows[name], rows_of(conversation, first, end), err_msg=name)
        assert core.rows[name].dtype == np.uint8
        if name == "short" and not all_want_logprobs:
            assert core.logprobs[name] is None
            continue
        prompt = PROMPTS[name]
        assert core.logprobs[name] == [logprob_of(conversation, sampled) for sampled in range(prompt, end + 1)]


def test_requests_that_decode_together_send_one_array_a_step(checkpoints: Checkpoints) -> None:
    sent = {}
    for packed in (True, False):
        core = Core(checkpoints.a, packed)
        for number in range(4):
            core.add(f"request {number}", number, prompt=10, tokens=20)
        for _ in range(21):
            core.step()
        sent[packed] = core.arrays, core.logprob_arrays
        assert len(core.rows) == 4
    assert sent == {True: (4 + 19, 20), False: (4 * 20, 4 * 20)}


def output(*tokens: int, rows: np.ndarray | None = None, logprobs: Any = None) -> Any:
    return types.SimpleNamespace(new_token_ids=list(tokens), routed_experts=rows, new_logprobs=logprobs)


def test_a_row_is_not_kept_alive_by_its_step() -> None:
    """A view would keep the rows of all requests of a step as long as the longest of them runs."""
    outputs = [output(7, rows=np.zeros((2, 1, 3, 2), np.uint8)), output(8)]
    delivery.unpack(outputs)
    assert [one.routed_experts.shape for one in outputs] == [(1, 3, 2)] * 2
    assert all(one.routed_experts.base is None for one in outputs)


def test_rows_that_are_not_as_many_as_their_requests_are_an_error() -> None:
    with pytest.raises(EngineError, match="2 packed rows for 3 requests"):
        delivery.unpack([output(7, rows=np.zeros((2, 1, 3, 2), np.uint8)), output(8), output(), output(9)])


def test_logprobs_that_are_not_as_many_as_their_requests_are_an_error() -> None:
    from vllm.v1.outputs import LogprobsLists

    packed = LogprobsLists(np.zeros((2, 1), int), np.zeros((2, 1), np.float32), np.zeros(2, int), None)
    with pytest.raises(EngineError, match="2 packed log-probs for 3 requests"):
        delivery.unpack([output(7, logprobs=packed), output(8), output(9)])


@pytest.mark.parametrize(
    ("variable", "change", "expected"),
    [
        ("4711", {}, "packed"),
        (None, {}, "did not request"),
        ("0", {}, "packing was turned off"),
        ("4711", {"captures": False}, "does not capture rows"),
        ("4711", {"speculative": object()}, "speculative decoding"),
        ("4711", {"replicas": 2}, "data parallelism"),
    ],
)
def test_where_it_is_not_for_us_rows_are_left_to_vllm(
    variable: str | None, change: dict[str, Any], expected: str
) -> None:
    made = {"captures": True, "speculative": None, "replicas": 1} | change
    switch = types.SimpleNamespace(enable_return_routed_experts=made["captures"])
    rest = {
        "speculative_config": made["speculative"],
        "parallel_config": types.SimpleNamespace(data_parallel_size=made["replicas"]),
    }
    up_to_0_30 = types.SimpleNamespace(model_config=switch, **rest)
    since_0_31 = types.SimpleNamespace(model_config=types.SimpleNamespace(), aux_output_config=switch, **rest)
    with environment(**{delivery.ENVIRONMENT: variable}):
        assert expected in delivery.state(up_to_0_30)
        assert expected in delivery.state(since_0_31)


def test_both_ways_to_vllm_pack(vllm_engine: Engine, vllm_http_engine: Engine) -> None:
    for engine in (vllm_engine, vllm_http_engine):
        assert engine.report()["delivery"] == "packed"
