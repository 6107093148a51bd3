"""List every place where the plugin touches vLLM, in one table.

A seam says for which versions of vLLM it holds, and only those of the running version count. `register` checks them all
before it changes anything. If one seam of the part "core" does not fit, nothing is patched. The seams of "delivery" and
"storage" are separate parts, because vLLM works without them: if one of them does not fit, rows are sent or stored as
vLLM does it. So is "cache": without it, vLLM compiles at every start. The seams of "precision" are needed if float32
routers are asked for. Without those of "direct", vLLM's loader makes every weight update. `report()["seams"]` of an
engine contains the seams of its version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

from router_replay.engines.vllm import versions
from router_replay.errors import RouterReplayError

Part = Literal["core", "delivery", "storage", "cache", "precision", "direct"]
Use = Literal["wrapped", "wrapped on the object", "added to", "called", "read"]
FIRST_RUNNER, SECOND_RUNNER, ALL = "0.26-0.30", "0.31-0.32", "0.26-0.32"


@dataclasses.dataclass(frozen=True)
class Seam:
    """Describe one thing in vLLM that the plugin relies on.

    `owner` is "module:Class" or "module", and `name` is an attribute of it (empty for the owner itself). `use` says how
    the plugin touches it, and `why` what the plugin does there. `looks` lists the parameters, fields, or names used in
    the code that must exist. `versions` gives the first and the last version of vLLM in which the plugin uses it.
    """

    owner: str
    name: str
    use: Use
    why: str
    looks: tuple[str, ...] = ()
    part: Part = "core"
    versions: str = ALL

    def holds(self, version: str) -> bool:
        """Return whether the plugin uses this seam in this version of vLLM."""
        first, last = map(versions.numbers_of, self.versions.split("-"))
        return first <= versions.numbers_of(version) <= last

    def problem(self) -> str:
        """Return a description of what does not fit, or an empty string."""
        place = f"{self.owner}.{self.name}".rstrip(".")
        try:
            owner = _resolve(self.owner)
        except (ImportError, AttributeError) as error:
            return f"{self.owner} does not exist ({error})"
        if self.name and not hasattr(owner, self.name):
            return f"{place} does not exist"
        found = _names_of(getattr(owner, self.name) if self.name else owner)
        lost = [name for name in self.looks if name not in found]
        return f"{place} has no {', '.join(lost)}" if lost else ""


_INPUTS = "vllm.v1.engine.input_processor:InputProcessor"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_ROUTERS = "vllm.model_executor.layers.fused_moe.router"
_LINEAR = "vllm.model_executor.layers.linear"
_RELOAD = "vllm.model_executor.model_loader.reload"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_AUX = "vllm.distributed.aux_output_connector"
_CLIENT = "vllm.v1.engine.core_client:AsyncMPClient"
_LOADS = "loads new weights in place"
_CHECKS = "checks new weights without changing the running ones"
_WRITES = "new weights are written directly into the tensors of layers with this method"

SEAMS: tuple[Seam, ...] = (
    Seam(_INPUTS, "process_inputs", "wrapped", "checks forced rows, and salts the prefix cache"),
    Seam(
        "vllm.exceptions:VLLMValidationError", "", "called", "raised for bad forced rows; servers answer with HTTP 400"
    ),
    Seam(_WORKER, "load_model", "wrapped", "installs forced routing after the model is loaded"),
    Seam(_WORKER, "compile_or_warm_up_model", "wrapped", "learns that CUDA graphs are captured"),
    Seam(_WORKER, "start_weight_update", "wrapped", "allows a new update after one that failed"),
    Seam(_WORKER, "reload_weights", "called", _LOADS),
    Seam(_RUNNER, "reload_weights", "called", _LOADS, ("weights_iterator",), versions="0.26-0.31"),
    Seam(_RUNNER_2, "reload_weights", "called", _LOADS, ("weights_iterator",), versions="0.32-0.32"),
    Seam(
        _RUNNER,
        "_prepare_inputs",
        "wrapped on the object",
        "writes forced rows and records progress before each pass",
        ("scheduler_output", "num_scheduled_tokens", "input_batch"),
        versions=FIRST_RUNNER,
    ),
    Seam(
        _RUNNER_2,
        "prepare_inputs",
        "wrapped on the object",
        "writes forced rows and records progress before each pass",
        ("scheduler_output", "InputBatch", "req_states"),
        versions=SECOND_RUNNER,
    ),
    Seam(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        "",
        "read",
        "holds the requests of a pass, in the order of their tokens",
        ("req_ids", "num_reqs", "num_scheduled_tokens", "num_computed_tokens_np"),
        versions=SECOND_RUNNER,
    ),
    Seam(
        "vllm.config:AuxOutputConfig",
        "",
        "read",
        "says whether the engine captures routed experts",
        ("enable_return_routed_experts",),
        versions=SECOND_RUNNER,
    ),
    Seam(
        f"{_ROUTERS}.base_router:BaseRouter",
        "_compute_routing",
        "wrapped on the object",
        "replaces a router's choice with forced rows",
        ("hidden_states", "router_logits", "indices_type"),
    ),
    Seam(f"{_ROUTERS}.zero_expert_router:ZeroExpertRouter", "", "read", "forced routing refuses routers of this class"),
    Seam(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
        "do_naive_dispatch_combine",
        "read",
        "forced routing refuses layers that route the tokens of other ranks",
    ),
    Seam(
        _CLIENT,
        "collective_rpc_async",
        "wrapped",
        "lets all data-parallel ranks answer the plugin's calls",
        ("method", "timeout", "args", "kwargs"),
    ),
    Seam(_CLIENT, "_call_utility_async", "called", "calls one data-parallel rank", ("method", "engine")),
    Seam("vllm.envs", "environment_variables", "added to", "says in /server_info that the plugin is there"),
    Seam(f"{_RELOAD}.layerwise", "get_layerwise_info", "called", _CHECKS),
    Seam(f"{_RELOAD}.layerwise", "_get_original_loader", "called", _CHECKS),
    Seam(f"{_RELOAD}.meta", "restore_layer_on_meta", "called", _CHECKS),
    Seam(f"{_RELOAD}.meta", "get_numel_loaded", "called", _CHECKS),
    Seam(f"{_RELOAD}.meta", "to_meta_tensor", "called", _CHECKS),
    Seam(
        "vllm.distributed.weight_transfer:WeightTransferEngineFactory",
        "register_engine",
        "called",
        "registers the weight-transfer backend router_replay",
    ),
    Seam(
        "vllm.v1.engine.core:EngineCoreProc",
        "run_busy_loop",
        "wrapped",
        "ignores Ctrl-C; the engine's owner handles it",
    ),
    Seam(
        "vllm.outputs:RequestOutput", "add", "wrapped", "keeps the rows of merged answers", ("next_output", "aggregate")
    ),
    Seam(
        "vllm.v1.engine.core_client:MPClient",
        "__init__",
        "wrapped",
        "unpacks rows where messages are read",
        ("vllm_config", "client_addresses"),
        "delivery",
    ),
    Seam(_SCHEDULER, "__init__", "wrapped", "packs the rows of a step", (), "delivery"),
    Seam(
        _SCHEDULER,
        "update_from_output",
        "wrapped on the object",
        "sends the rows and log-probs of a step together",
        ("_re_block_ids", "routed_experts_mgr", "store_batch", "routed_experts"),
        "delivery",
        FIRST_RUNNER,
    ),
    Seam(
        _SCHEDULER,
        "update_from_output",
        "wrapped on the object",
        "sends the rows and log-probs of a step together",
        ("aux_output_connector", "take_output"),
        "delivery",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.worker:AuxOutputWorkerConnector",
        "_commit_output",
        "wrapped",
        "stores the rows of decoding requests at once",
        (
            *("pending", "_buffer", "_requests", "_publish_blocks", "query_start_loc", "token_starts", "num_sampled"),
            *("num_rejected", "routed_experts", "capture_cursor", "scheduled_cursor", "emit_cursor"),
        ),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.worker:AuxOutputWorkerConnector",
        "__init__",
        "wrapped",
        "writes full blocks at once, without a thread",
        ("_store", "BackgroundBlockObjectStore"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.store:BackgroundBlockObjectStore",
        "_run",
        "read",
        "shows how its thread is ended",
        ("_queue", "_store", "get", "put"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.worker:AuxOutputWorkerConnector",
        "begin_step",
        "wrapped",
        "brings vLLM's records of described requests up to date",
        ("metadata", "_buffer", "_lock", "_generation", "requests", "emit_cursor"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.worker:AuxOutputWorkerConnector",
        "_teardown",
        "wrapped",
        "forgets requests that ended",
        ("request_ids", "_requests"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.connector:AuxOutputSchedulerConnector",
        "build_connector_meta",
        "wrapped",
        "describes only requests that are new or have new block hashes to the worker",
        ("scheduler_output", "requests", "num_scheduled_tokens", "_sent_hash_counts", "_pack_new_hashes"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        f"{_AUX}.routed_experts:RoutedExpertsBuffer",
        "capture",
        "read",
        "shows how a row is stored",
        ("dtype", "shape_per_token", "block_size", "_tail", "_rows", "_requests", "_owned_slots", "slot", "length"),
        "storage",
        SECOND_RUNNER,
    ),
    Seam(
        _SCHEDULER,
        "_update_after_schedule",
        "wrapped on the object",
        "lists the blocks of prompts only",
        ("_re_block_ids", "enable_return_routed_experts"),
        "delivery",
        FIRST_RUNNER,
    ),
    Seam(
        "vllm.v1.engine:EngineCoreOutput",
        "",
        "read",
        "carries the packed rows",
        ("routed_experts", "new_token_ids", "new_logprobs"),
        "delivery",
    ),
    Seam(
        "vllm.config:ModelConfig",
        "compute_hash",
        "wrapped",
        "finds compiled code again for the same model in another folder",
        ("get_hash_factors", "hash_factors"),
        "cache",
    ),
    Seam(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
        "__init__",
        "wrapped",
        "the weights of a router become float32 before they are loaded",
        ("gate", "shared_expert_gate", "layer_name"),
        "precision",
    ),
    Seam(
        f"{_LINEAR}:ReplicatedLinear",
        "forward",
        "called",
        "a router computes its logits in float32",
        ("x",),
        "precision",
    ),
    Seam(f"{_LINEAR}:UnquantizedLinearMethod", "", "read", "quantized routers are refused", (), "precision"),
    Seam(f"{_LINEAR}:UnquantizedLinearMethod", "process_weights_after_loading", "read", _WRITES, (), "direct"),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        "process_weights_after_loading",
        "read",
        _WRITES,
        (),
        "direct",
    ),
    Seam(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "process_weights_after_loading",
        "read",
        _WRITES,
        (),
        "direct",
    ),
    Seam(
        "vllm.model_executor.layers.attention:Attention",
        "process_weights_after_loading",
        "read",
        "other attention, which computes from weights, is loaded by vLLM's loader",
        (),
        "direct",
    ),
    Seam(
        "vllm.v1.outputs:LogprobsLists",
        "",
        "read",
        "carries the packed log-probs",
        ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"),
        "delivery",
    ),
)


def problems(part: Part = "core") -> list[str]:
    """Return the reasons why this part cannot be installed into this vLLM; the list is empty if it can."""
    import vllm

    try:
        versions.refuse_version(vllm.__version__)
    except RouterReplayError as error:
        return [str(error)]
    return [problem for seam in _seams() if seam.part == part and (problem := seam.problem())]


def table() -> list[dict[str, str]]:
    """Return the seams of this vLLM's version for `report()`, each with its problem."""
    return [
        {
            "owner": seam.owner,
            "name": seam.name,
            "use": seam.use,
            "why": seam.why,
            "part": seam.part,
            "versions": seam.versions,
            "problem": seam.problem(),
        }
        for seam in _seams()
    ]


def _seams() -> list[Seam]:
    import vllm

    return [seam for seam in SEAMS if seam.holds(vllm.__version__)]


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method `name` of `owner` with `make(original)`, once per process."""
    original = getattr(owner, name)
    if getattr(original, "router_replay", False):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement.router_replay = True
    setattr(owner, name, replacement)


def _resolve(owner: str) -> Any:
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _names_of(target: Any) -> set[str]:
    """Return a function's parameters and the names in its code, or the fields of a struct or named tuple."""
    return set(_names(target))


def _names(target: Any) -> Iterator[str]:
    yield from getattr(target, "__struct_fields__", ())
    yield from getattr(target, "_fields", ())
    yield from getattr(target, "__dataclass_fields__", ())
    if inspect.isroutine(target):
        yield from inspect.signature(target).parameters
        yield from getattr(getattr(inspect.unwrap(target), "__code__", None), "co_names", ())
