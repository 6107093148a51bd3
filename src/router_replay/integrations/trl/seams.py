"""List what this integration uses of TRL, in one table, and refuse a TRL in which it differs.

Most of it is private in TRL and may change in any release. `make test-trl` runs everything on the tested release; the
table lets an untested one fail at the import, with the difference, and not in the middle of a run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from typing import Any

from router_replay.errors import ConfigError

TESTED = ("1.16", "1.9")
"""The releases of TRL, without the patch number, that `make test-trl` and `make test-axolotl` run."""

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_GENERATION = "trl.generation.vllm_generation:VLLMGeneration"

# What is overridden or called: the parameters that it must have, in this order. More may follow the last one.
SIGNATURES: dict[str, tuple[str, ...]] = {
    f"{_TRAINER}._generate": ("self", "prompts"),
    f"{_TRAINER}._generate_and_score_completions": ("self", "inputs"),
    f"{_TRAINER}._get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ),
    f"{_TRAINER}._compute_loss": ("self", "model", "inputs"),
    f"{_TRAINER}.log": ("self", "logs", "start_time"),
    f"{_GENERATION}.__init__": ("self", "model", "accelerator", "processing_class", "mode"),
    f"{_GENERATION}._init_vllm": ("self",),
    f"{_GENERATION}.sync_weights": ("self",),
    f"{_GENERATION}.generate": ("self", "prompts", "images", "num_generations", "profiler"),
}
# TRL 1.9 has no iterator over the weights: it walks over them itself, and hands each one to a method.
WALKS: dict[str, dict[str, tuple[str, ...]]] = {
    "1.16": {f"{_GENERATION}._iter_named_params": ("self",)},
    "1.9": {f"{_GENERATION}._push_param_to_vllm": ("self", "name", "param")},
}
# What the code of a method must contain: the names that it reads or returns, and the order of results and of chunks.
MENTIONS: dict[str, tuple[str, ...]] = {
    f"{_TRAINER}._generate_single_turn": ("vllm_generation", "sync_weights", "_last_loaded_step", "num_generations"),
    f"{_TRAINER}._generate": (
        "rollout_func",
        "env_mask",
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields",
    ),
    f"{_TRAINER}._get_per_token_logps_and_entropies": (
        "range(0, input_ids.size(0), batch_size)",
        "model(**model_inputs",
    ),
    f"{_TRAINER}._generate_and_score_completions": (
        "prompt_mask",
        "completion_mask",
        "old_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
        "vllm_importance_sampling_correction",
    ),
    f"{_TRAINER}._prepare_inputs": ("shuffle_sequence_dict", "split_tensor_dict"),
    f"{_TRAINER}.log": ("_metrics", '"train" if self.model.training else "eval"', "eval_", "clear()"),
}


def problems(release: str = TESTED[0]) -> list[str]:
    """Return one line for each entry of the table that the installed TRL, a `release`, does not have as described."""
    found = []
    for place, expected in (SIGNATURES | WALKS[release]).items():
        method = _method(place)
        parameters = () if method is None else tuple(inspect.signature(method).parameters)
        if parameters[: len(expected)] != expected:
            found.append(f"{place} takes {parameters}, expected {expected}")
    for place, names in MENTIONS.items():
        method = _method(place)
        source = "" if method is None else inspect.getsource(method)
        if missing := [name for name in names if name not in source]:
            found.append(f"{place} does not mention {', '.join(missing)}")
    return found


def refuse_other_trl() -> None:
    """Raise ConfigError if TRL is not installed, not a tested release, or differs from the table."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"TRL is not installed: pip install 'trl=={TESTED[0]}.*'") from error
    release = ".".join(version.split(".")[:2])
    if release not in TESTED:
        raise ConfigError(
            f"TRL {version} is installed, but router_replay.integrations.trl was tested with TRL "
            f"{' and '.join(TESTED)} only, and uses private methods of its GRPOTrainer: pip install "
            f"'trl=={TESTED[0]}.*'"
        )
    if found := problems(release):
        raise ConfigError(f"this TRL {version} differs from the one that was tested: {'; '.join(found)}")


def _method(place: str) -> Any:
    module, _, path = place.partition(":")
    owner, _, name = path.partition(".")
    return getattr(getattr(importlib.import_module(module), owner, None), name, None)
