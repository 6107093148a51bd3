"""Refuse settings of a run that cannot work with replay, at the start and with the reason."""

from __future__ import annotations

from typing import Any

from router_replay.engines.base import Engine
from router_replay.errors import ConfigError
from router_replay.spec import RouterSpec

MODES = ("off", "r2", "r3")

# Settings of GRPOConfig that change how tokens are sampled, and the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, None),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None, {}),
    "vllm_structured_outputs_regex": (None,),
    "use_transformers_continuous_batching": (False,),
}


def has_old_pass(args: Any, with_engine: bool) -> bool:
    """Return whether TRL computes the log-probs of the old policy in a pass of its own, as TRL decides it."""
    corrects = (with_engine or args.use_vllm) and args.vllm_importance_sampling_correction
    every = args.steps_per_generation * args.num_iterations
    return bool(corrects or args.gradient_accumulation_steps % every)


def refuse(args: Any, replay: str, *, engine: Any, rollout_func: Any, tools: bool, processes: int) -> None:
    """Raise ConfigError if this run cannot work. It is called before TRL builds anything.

    `args` are the GRPOConfig. `engine` and `rollout_func` are those of the trainer, or None. `tools` says whether TRL's
    tool loop will run, and `processes` is the number of processes.
    """
    if replay not in MODES:
        raise ConfigError(f"replay must be one of {MODES}, got {replay!r}")
    if engine is not None:
        _refuse_with_engine(args, engine, tools, processes)
    elif replay == "r3":
        _refuse_r3_without_engine(args, rollout_func)
    if replay == "r2" and not has_old_pass(args, engine is not None):
        raise ConfigError(
            'replay="r2" uses the experts of the old-policy pass, and with these settings TRL has no such pass: each '
            "batch is trained once, by the policy that sampled it. Set num_iterations above 1, or steps_per_generation "
            "above gradient_accumulation_steps, or use an engine with vllm_importance_sampling_correction"
        )
    if replay != "off" and (args.model_init_kwargs or {}).get("use_kernels"):
        raise ConfigError(
            "model_init_kwargs has use_kernels: some of transformers' kernels never call the router module, so that "
            'nothing would be replayed. Leave it out, or pass replay="off"'
        )


def _refuse_with_engine(args: Any, engine: Any, tools: bool, processes: int) -> None:
    if args.use_vllm:
        raise ConfigError(
            "use_vllm=True starts TRL's own vLLM beside the engine of Router Replay: leave use_vllm out. For a vLLM "
            "server, pass engine=lambda: VllmHttpEngine(url), and for a colocated vLLM engine=lambda: VllmEngine(model)"
        )
    changed = [name for name, neutral in NEUTRAL.items() if getattr(args, name) not in neutral]
    if changed:
        values = ", ".join(f"{name}={getattr(args, name)!r}" for name in changed)
        raise ConfigError(
            f"{values}: the engines of Router Replay do not have these settings (they have temperature and top_p), and "
            "would ignore them: leave them out"
        )
    mode = args.vllm_importance_sampling_mode if args.vllm_importance_sampling_correction else "token_mask"
    if args.loss_type == "vespo" and mode not in ("token_truncate", "token_mask"):  # TRL checks it with use_vllm only
        raise ConfigError(
            f'loss_type="vespo" needs vllm_importance_sampling_mode "token_truncate" or "token_mask", got "{mode}"'
        )
    if processes > 1 and isinstance(engine, Engine):
        raise ConfigError(
            f"this run has {processes} processes, and one engine serves them all: pass a function that makes it, such "
            "as engine=lambda: VllmHttpEngine(url). It is called in the first process only"
        )
    if processes > 1 and tools:
        raise ConfigError(
            f"tools and environments with an engine need one process, got {processes}: each process of TRL asks for "
            "its own number of further turns, and one engine cannot know when to stop waiting for the others. Use a "
            "rollout_func"
        )


def _refuse_r3_without_engine(args: Any, rollout_func: Any) -> None:
    if rollout_func is not None:
        return
    if args.use_vllm and args.vllm_mode == "server":
        why = (
            "TRL's client drops the experts from the answers of its vLLM server: leave use_vllm out and pass "
            "engine=lambda: VllmHttpEngine(url), which uses the same server"
        )
    elif args.use_vllm:
        why = (
            "TRL starts its colocated vLLM without enable_return_routed_experts, and has no setting for it: leave "
            "use_vllm out and pass engine=lambda: VllmEngine(model)"
        )
    else:
        why = "TRL generates with transformers, which does not return them: pass engine=lambda: EmbeddedEngine(model)"
    raise ConfigError(f'replay="r3" needs the experts of the rollout. {why}. Or pass replay="r2"')


def refuse_engine(engine: Engine, spec: RouterSpec, replay: str) -> None:
    """Raise ConfigError if `engine` has other routers than the policy, those of `spec`, or cannot do what is needed."""
    can = engine.capabilities
    if engine.spec != spec:
        raise ConfigError(
            f"the engine has a model with {engine.spec}, but the policy has {spec}: start both with the same model"
        )
    if replay == "r3" and not can.routes:
        raise ConfigError(
            f'replay="r3" needs an engine that returns the experts it used, and this one does not: {can.why_not}. Pass '
            'replay="r2" to record them in the trainer instead'
        )
    if not can.versions:
        raise ConfigError(f"training needs an engine that takes new weights, and this one does not: {can.why_not}")
