"""Runs vLLM from this process: AsyncLLM runs on a separate thread, its workers in processes that vLLM starts.

    with VllmEngine("Qwen/Qwen3-30B-A3B", max_model_len=4096) as engine:
        [completion] = engine.generate([Request((5, 6, 7), Sampling(max_tokens=8))])

Additional keyword arguments are passed to vLLM as engine arguments.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any, Literal

from router_replay.engines import checks
from router_replay.engines.backend import Flight
from router_replay.engines.environment import environment
from router_replay.engines.types import Capabilities, InFlight
from router_replay.engines.vllm import plugin
from router_replay.engines.vllm.client import Transport, VllmClient
from router_replay.engines.vllm.plugin import seams
from router_replay.engines.vllm.plugin.repairs import signals
from router_replay.engines.vllm.requests import end_of_sequence_ids, sampling_arguments
from router_replay.engines.vllm.samples import Sample
from router_replay.engines.vllm.versions import NOT_INSTALLED, model_runner, refuse_version
from router_replay.errors import EngineError
from router_replay.routes import Routes
from router_replay.spec import RouterSpec

# vLLM gives its processes 5 s to end. On a busy machine they need longer, and a process that is killed leaves its
# shared memory to Python's resource tracker, which warns about it. The engine core waits for its workers first.
SHUTDOWN_SECONDS = 40
WORKER_SHUTDOWN_SECONDS = 25
WORKER_SHUTDOWN = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"


class VllmEngine(VllmClient):
    """Starts and owns a vLLM engine for `model`, a Hugging Face folder or a name on the hub.

    `version` is the policy version of these weights. With `forced_routes=False` the routers are not modified.
    `router_dtype="float32"` computes the routers' logits in float32, whatever the dtype of the model is.
    `engine_arguments` are passed to vLLM.
    `allow_zero_layers` is for top-1 models in which a layer can choose expert 0 for 64 consecutive tokens.
    """

    def __init__(
        self,
        model: str,
        *,
        version: int = 0,
        forced_routes: bool = True,
        allow_zero_layers: bool = False,
        router_dtype: Literal["model", "float32"] = "model",
        **engine_arguments: Any,
    ) -> None:
        checks.router_dtype(router_dtype)
        super().__init__(
            lambda: _start(str(model), forced_routes, router_dtype, engine_arguments),
            version,
            allow_zero_layers=allow_zero_layers,
        )


async def _start(model: str, forced_routes: bool, router_dtype: str, engine_arguments: dict[str, Any]) -> Transport:
    try:
        import vllm
    except ImportError as error:
        raise EngineError(NOT_INSTALLED) from error
    refuse_version(vllm.__version__)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    defaults = {
        "enable_return_routed_experts": True,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that was sampled from
        "generation_config": "vllm",  # a checkpoint's own sampling defaults must not change ours
    }
    problems = seams.problems()
    if problems:
        raise EngineError(
            f"the plugin of Router Replay does not fit this vLLM: {'; '.join(problems)}. Install a tested version"
        )
    patience = {WORKER_SHUTDOWN: str(WORKER_SHUTDOWN_SECONDS)}
    wanted = _variables(forced_routes, vllm.__version__, router_dtype)
    with environment(wanted), environment(patience, keep_existing=True):
        plugin.register()  # this process may have loaded vLLM's plugins before ours was requested
        try:
            arguments = AsyncEngineArgs(model=model, **{**defaults, **engine_arguments})
            transport = _InProcess(AsyncLLM.from_engine_args(arguments))
        except Exception as error:
            raise EngineError(
                f"vLLM did not start with {model}: {error}. The log of its processes shows the cause. A script that "
                "starts an engine needs `if __name__ == '__main__':`, because vLLM's processes import the script again"
            ) from error
    try:
        transport.capabilities = await _capabilities(transport, forced_routes)
    except BaseException:
        await transport.close()
        raise
    return transport


async def _capabilities(transport: Transport, forced_routes: bool) -> Capabilities:
    """Return the capabilities that all workers report. Raises EngineError if vLLM silently skipped the plugin."""
    try:
        reports = await transport.call_all("router_replay_report")
    except Exception as error:
        raise EngineError(
            "the plugin of Router Replay is not active in vLLM's worker. If the plugin failed, the worker's log shows "
            "the reason. Otherwise install router-replay in the worker's environment (vLLM finds the plugin by its "
            f"entry point) and, if VLLM_PLUGINS is set, add router_replay to it. The worker answered: {error}"
        ) from error
    for report in reports:
        if not report.get("active", True):
            raise EngineError(report["reason"])
    report = next((report for report in reports if not report["forced_routes"]), reports[0])
    if forced_routes and not report["forced_routes"]:
        raise EngineError(
            f"this vLLM engine cannot force routes: {report['reason']}. If you do not need forced routes, pass "
            "forced_routes=False"
        )
    return Capabilities(
        routes=all(report["captures"] for report in reports),
        forced_routes=report["forced_routes"],
        start=True,
        versions=True,
        checked_weights=True,
        why_not=report["reason"],
    )


def _variables(forced_routes: bool, version: str, router_dtype: str = "model") -> dict[str, str]:
    """Return the environment variables that enable the plugin in the processes that vLLM starts."""
    asked = "1" if forced_routes else plugin.OBSERVE
    variables = {plugin.ENVIRONMENT: asked, signals.OWNER: str(os.getpid()), **model_runner(version)}
    return {**variables, plugin.ROUTER_DTYPE: "" if router_dtype == "model" else router_dtype}


class _InProcess(Transport):
    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config.model_config
        self._engine = engine
        self.spec = RouterSpec.from_config(config.hf_config)
        self.vocabulary = checks.vocabulary_of(config.hf_config.to_dict())
        self.logprobs_mode = str(config.logprobs_mode)
        self._end_of_sequence = end_of_sequence_ids(config.try_get_generation_config())
        self._end_of_sequence = self._end_of_sequence or end_of_sequence_ids(config.hf_config.to_dict())

    async def generate(self, flight: Flight) -> list[Sample]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = flight.request
        parameters = SamplingParams(
            **sampling_arguments(request, self._end_of_sequence, as_text=False),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(map(int, request.token_ids)), "cache_salt": flight.salt}
        outputs = [output async for output in self._engine.generate(prompt, parameters, flight.name)]
        if not outputs:
            raise EngineError(f"{request.id}: vLLM ended the request without an answer")
        return [self._sample(choice) for choice in outputs[-1].outputs]

    def _sample(self, choice: Any) -> Sample:
        tokens = list(choice.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, choice.logprobs or (), strict=False)]
        array = choice.routed_experts
        # vLLM made the array for this answer, so it is not copied. CaptureWatch counts zero layers over all answers.
        rows = None if array is None else Routes._from_engine(array, self.spec, allow_zero_layers=True, owned=True)
        return Sample(choice.index, tokens, logprobs, rows, choice.finish_reason)

    async def abort(self, names: Sequence[str]) -> None:
        await self._engine.abort(list(names))

    async def pause(self, mode: InFlight) -> None:
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def call_all(self, method: str, **arguments: str) -> list[dict[str, Any]]:
        return list(await self._engine.collective_rpc(method, kwargs=arguments))

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._engine.reset_prefix_cache())

    def dead(self) -> bool:
        return bool(self._engine is not None and self._engine.errored)

    async def close(self) -> None:
        self._engine.shutdown(timeout=SHUTDOWN_SECONDS)
        self._engine = None
        gc.collect()  # its __del__ fails if it runs at interpreter exit
