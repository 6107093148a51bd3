"""TRL's generation backend over an engine of Router Replay.

TRL asks its `vllm_generation` for completions. This class stands there, so that TRL's tool loop, its
importance-sampling correction and its walk over sharded and adapted weights work as they do with vLLM. The first
process has the engine; the others send it their prompts, and each gets back the answers to its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from accelerate.utils import gather_object
from trl.generation.vllm_generation import VLLMGeneration

from router_replay.engines import EmbeddedEngine, VllmEngine
from router_replay.engines.base import Engine
from router_replay.engines.types import Completion, Request, Sampling
from router_replay.integrations.trl.sequences import Sequences
from router_replay.rl.config import EngineConfig
from router_replay.rl.rollout import seed_of
from router_replay.rl.weights.sync import WeightSync
from router_replay.spec import RouterSpec


class EngineGeneration(VLLMGeneration):
    """Generates with `engine`, which is None in all processes but the first.

    `spec` describes the routers of the policy. `sampling` has the settings that all requests share. Each request gets a
    seed drawn from `seed`, or none if it is None. `weights` is a folder that engine and trainer can both read, for an
    engine behind a URL; empty means shared memory or the temporary folder of this machine. `arguments` go to TRL.
    """

    def __init__(
        self,
        engine: Engine | None,
        spec: RouterSpec,
        sampling: dict[str, Any],
        seed: int | None,
        weights: str,
        **arguments: Any,
    ) -> None:
        self.engine = engine
        self.sequences = Sequences(spec)
        self._sampling, self._seed, self._weights = sampling, seed, weights
        self.step = 0  # of the run; with it, a resumed run does not repeat the seeds of its start
        self._calls = 0
        self._sync: WeightSync | None = None
        super().__init__(mode="server", **arguments)  # with "server", TRL reads no setting of the engine

    def _init_vllm(self) -> None:
        self.accelerator.wait_for_everyone()

    # -- weights --------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Give the engine the policy's weights as its next version. TRL calls this after a change of the weights."""
        state = self._gathered()  # every process takes part: gathering a parameter is collective
        if self.engine is None:
            return
        base = _base(self.accelerator.unwrap_model(self.model))
        state |= dict(_persistent_buffers(base))
        if self._sync is None:
            wide = base.dtype is torch.float32  # an engine in bfloat16 rounds the weights itself
            config = EngineConfig(
                kind=_kind(self.engine), dtype="float32" if wide else "bfloat16", weights=self._weights
            )
            self._sync = WeightSync(config, base, frozenset())
        self._sync.push(self.engine, state, self.engine.version + 1)

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Return the policy's parameters, adapters merged, in the process that has the engine; {} in the others."""
        self._state: dict[str, torch.Tensor] = {}
        if hasattr(VLLMGeneration, "_iter_named_params"):
            for name, tensor in self._iter_named_params():
                self._push_param_to_vllm(name, tensor)
        else:  # TRL 1.9
            self.vllm_client = _NoClient()
            super().sync_weights()
        state, self._state = self._state, {}
        return state

    def _push_param_to_vllm(self, name: str, param: torch.Tensor) -> None:
        # Copied, because TRL takes the adapters out again, and frees what it gathered, at the end of its walk.
        if self.engine is not None:
            self._state[name] = param.detach().to("cpu", copy=True)

    def close(self) -> None:
        """Close the engine, and remove the files and the shared memory of its weights."""
        if self._sync is not None:
            self._sync.close()
        if self.engine is not None:
            self.engine.close()

    # -- completions ----------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        images: Any,
        num_generations: int,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any, Any, None]:
        """Sample one completion for each of the `prompts`, which repeat every prompt `num_generations` times.

        `images` must be None: a vision model is refused at the start. `profiler` is TRL's. Returns the prompts, the
        tokens, and their log-probs as TRL's vLLM returns them.
        """
        trajectories = self.sequences.of_prompts(prompts)
        starts = [one.start_for(prompt) for one, prompt in zip(trajectories, prompts, strict=True)]
        with profiler or contextlib.nullcontext():
            answers = self._answers(list(zip(prompts, starts, strict=True)), num_generations)
        for trajectory, prompt, answer in zip(trajectories, prompts, answers, strict=True):
            self.sequences.add(trajectory, prompt, answer)
        logprobs = [[[value] for value in answer.logprobs.tolist()] for answer in answers]
        return prompts, [answer.token_ids.tolist() for answer in answers], logprobs, None

    def _answers(self, asked: list[tuple[list[int], int]], n: int) -> list[Completion]:
        """Return the answers to what this process asked, prompts with the number of rows that it knows already."""
        everyone: list[tuple[list[int], int]] = gather_object(asked)
        shares = None
        if self.engine is not None:
            answers = self._generated(everyone[::n], n)
            shares = [answers[first : first + len(asked)] for first in range(0, len(answers), len(asked))]
        if self.accelerator.num_processes == 1:
            assert shares is not None
            return shares[0]
        mine: list[Any] = [None]
        torch.distributed.scatter_object_list(mine, shares, src=0)  # no process gets the rows of the others
        return mine[0]

    def _generated(self, asked: Sequence[tuple[list[int], int]], n: int) -> list[Completion]:
        assert self.engine is not None
        self._calls += 1
        requests = []
        for number, (prompt, known) in enumerate(asked):
            seed = None if self._seed is None else seed_of(self._seed, self.step, self._calls, number)
            start = known if self.engine.capabilities.start else 0
            requests.append(Request(prompt, Sampling(**self._sampling, seed=seed, n=n), start))
        return self.engine.generate(requests)


class _NoClient:
    """Stands where TRL 1.9 has the client of its server, which it tells to forget its cache after the weights."""

    def reset_prefix_cache(self) -> None:
        """Do nothing: our engines forget it when they get new weights."""


def _kind(engine: Engine) -> Any:
    """Return the kind of an engine, which decides in which form it gets new weights."""
    if isinstance(engine, EmbeddedEngine):
        return "embedded"
    return "vllm" if isinstance(engine, VllmEngine) else "vllm_http"  # a server, or a pool: all kinds take a folder


def _base(model: Any) -> Any:
    """Return the transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint holds, such as a router's bias; TRL's walk is over parameters only."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".replace(".base_layer", ""), buffer.detach().to("cpu", copy=True)
