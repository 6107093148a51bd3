"""Derive a RouterSpec from a transformers config: an object, or the dict of a `config.json`.

    spec_from_config({"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1,
                      "n_routed_experts": 256, "num_experts_per_tok": 8})
    -> RouterSpec(num_experts=256, top_k=8, layers=(1, 2, 3), num_layers=4)

Neither torch nor transformers is imported. A config gives three facts: the number of experts, how many
of them are chosen per token, and the routed layers. Each is read from a short list of field names that
the families share; the `config` of a family's record holds what differs in a model type or is not in its config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from router_replay.errors import SpecError
from router_replay.families.records import by_model_type
from router_replay.families.types import ConfigRules
from router_replay.spec import RouterSpec

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
MAX_LAYERS = 1 << 16
DEPTH_FIELDS = ("num_hidden_layers", "num_layers", "n_layers")
# The fields in which a multimodal config keeps its decoder, tried in this order.
TEXT_FIELDS = ("text_config", "thinker_config", "llm_config", "language_config")

ROUTED_KINDS = ("sparse", "moe")  # "dense" has no router, "hash_moe" (deepseek_v4) chooses by token id


def spec_from_config(config: Any) -> RouterSpec:
    """Return the RouterSpec that a transformers config, or its dict, describes.

    Raises SpecError if the model has no router or the config does not give the experts, the top-k or the layers.
    """
    fields = _decoder_fields(_as_mapping(config))
    model_type = fields.get("model_type") or None
    family = by_model_type(model_type)
    rules = family.config or ConfigRules()
    if rules.nested:
        fields = {**fields, **_as_mapping(fields.get(rules.nested) or {}), "model_type": model_type}
    if rules.switch and not fields.get(rules.switch):
        raise SpecError(
            f"this {model_type} config has {rules.switch}={fields.get(rules.switch)!r}: a dense model has no router"
        )

    num_layers = _depth(fields, rules)
    num_experts = _number(fields, EXPERT_FIELDS, "the number of experts")
    num_experts += int(fields.get(rules.extra_experts) or 0) if rules.extra_experts else 0
    top_k = family.top_k or _number(fields, TOP_K_FIELDS, "the experts per token")
    layers = _routed_layers(fields, rules, num_layers, known=family.config is not None or model_type is None)
    if not layers:
        raise SpecError(f"none of the {num_layers} decoder layers of this {model_type} config has a router")
    return RouterSpec(
        num_experts=num_experts + rules.skip_classes,
        top_k=top_k,
        layers=tuple(layer for layer in layers for _ in range(rules.routers_per_layer)),
        ordered=family.ordered,
        num_layers=num_layers,
    )


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if hasattr(config, "__dict__"):
        return vars(config)
    raise SpecError(f"expected a transformers config or its dict, got {type(config).__name__}")


def _decoder_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text decoder's fields of a multimodal config; fields that count experts are returned unchanged."""
    for _ in range(len(TEXT_FIELDS)):
        nested = next((fields[name] for name in TEXT_FIELDS if fields.get(name) is not None), None)
        if nested is None or any(fields.get(name) is not None for name in EXPERT_FIELDS):
            return fields
        fields = _as_mapping(nested)
    return fields


def _number(fields: Mapping[str, Any], names: tuple[str, ...], what: str) -> int:
    """Return the first of these fields that is set. The numbers of a list (one per layer) must be equal."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, list | tuple):
            if len(set(value)) > 1:
                raise SpecError(
                    f"{name} must be the same in all layers, since one RouterSpec describes all of them, got {value}"
                )
            value = value[0] if value else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise SpecError(
        f"this config does not give {what}: expected one of the fields {', '.join(names)} "
        f"(in it, or in its {', '.join(TEXT_FIELDS)}); {_what_is_there(fields, names)}"
    )


def _what_is_there(fields: Mapping[str, Any], names: tuple[str, ...]) -> str:
    unset = [name for name in names if name in fields]
    near = sorted(name for name in fields if any(part in name for part in ("expert", "moe", "top_k", "topk", "router")))
    found = f"{unset[0]} is {fields[unset[0]]!r}" if unset else f"related fields: {', '.join(near) or 'none'}"
    return f"model_type is {fields.get('model_type')!r}, {found}. For another model, make RouterSpec(...) yourself"


def _depth(fields: Mapping[str, Any], rules: ConfigRules) -> int:
    for name in ("layers_block_type", "hybrid_override_pattern"):  # nemotron_h derives its depth from either
        if fields.get(name) and not fields.get("num_hidden_layers"):
            return len(fields[name])
    depth = _number(fields, (rules.depth,) if rules.depth else DEPTH_FIELDS, "the number of decoder layers")
    if depth > MAX_LAYERS:  # a config may come from a server; a huge layer list would exhaust the memory
        raise SpecError(f"this config has {depth} decoder layers, expected at most {MAX_LAYERS}")
    return depth


def _routed_layers(fields: Mapping[str, Any], rules: ConfigRules, depth: int, *, known: bool) -> list[int]:
    """Return the decoder layers that hold a router.

    Fields that list layers take precedence over fields with arithmetic, and the config over a family's default.
    """
    for name, rule in LAYER_RULES.items():
        if fields.get(name) is not None:
            routed = rule(fields, rules, depth)
            if routed is not None:
                return [layer for layer in routed if 0 <= layer < depth]
    if not known:
        raise SpecError(
            f"the routed layers are not known: model_type {fields.get('model_type')!r} has no record, and its config "
            f"has none of {', '.join(LAYER_RULES)}. Make RouterSpec(num_experts, top_k, layers) yourself"
        )
    return list(range(min(rules.dense_first, depth), depth))


Rule = Callable[[Mapping[str, Any], ConfigRules, int], "list[int] | None"]


def _by_kind(name: str) -> Rule:
    def rule(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int] | None:
        kinds = list(fields[name])[:depth]  # step3p7 lists its MTP layers after the decoder's
        return [layer for layer, kind in enumerate(kinds) if kind in ROUTED_KINDS]

    return rule


def _block_types(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int] | None:
    """Return the MoE blocks that nemotron_h names; None for other hybrids, which name only the kind of attention."""
    return _by_kind("layers_block_type")(fields, rules, depth) if "moe" in fields["layers_block_type"] else None


def _listed(name: str) -> Rule:
    def rule(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
        items = fields[name].split(",") if isinstance(fields[name], str) else fields[name]
        return sorted(int(item) for item in items if str(item).strip())

    return rule


def _layer_freq(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    """Read a flag per layer (minimax_m3), or every n-th layer after the leading dense ones (DeepSeek)."""
    freq = fields["moe_layer_freq"]
    if isinstance(freq, list | tuple):
        return [layer for layer, routed in enumerate(freq) if routed]
    dense = fields.get("first_k_dense_replace")
    first = rules.dense_first if dense is None else int(dense)
    return [layer for layer in range(first, depth) if layer % int(freq) == 0]


def _ernie(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    def text(name: str, default: int) -> int:  # the VL checkpoints give [text, vision]
        value = fields.get(name)
        value = value[0] if isinstance(value, list | tuple) else value
        return default if value is None or value < 0 else int(value)

    start, end = text("moe_layer_start_index", 0), text("moe_layer_end_index", depth - 1)
    interval = text("moe_layer_interval", 1)
    return [layer for layer in range(start, min(end, depth - 1) + 1) if (layer + 1) % interval == 0]


def _sparse_step(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    step = int(fields["decoder_sparse_step"])
    dense = set(fields.get("mlp_only_layers") or ())
    if step <= 0:
        return []
    return [layer for layer in range(depth) if (layer + 1 - rules.sparse_offset) % step == 0 and layer not in dense]


def _jamba(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    period, offset = int(fields["expert_layer_period"]), int(fields.get("expert_layer_offset") or 0)
    return [layer for layer in range(depth) if layer % period == offset]


def _interleaved(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    step = int(fields["interleave_moe_layer_step"])
    return list(range(step - 1, depth, step))


def _pattern(fields: Mapping[str, Any], rules: ConfigRules, depth: int) -> list[int]:
    """Read the letter per layer of nemotron_h's hub configs; E is a MoE block."""
    return [layer for layer, letter in enumerate(fields["hybrid_override_pattern"]) if letter == "E"]


def _from(name: str) -> Rule:
    return lambda fields, rules, depth: list(range(int(fields[name]), depth))


LAYER_RULES: dict[str, Rule] = {
    "mlp_layer_types": _by_kind("mlp_layer_types"),
    "layers_block_type": _block_types,
    "hybrid_override_pattern": _pattern,
    "moe_layers": _listed("moe_layers"),
    "moe_layers_enum": _listed("moe_layers_enum"),
    "moe_layer_freq": _layer_freq,
    "interleave_moe_layer_step": _interleaved,
    "expert_layer_period": _jamba,
    "moe_layer_start_index": _ernie,
    "num_dense_layers": _from("num_dense_layers"),
    "dense_mlp_idx": _from("dense_mlp_idx"),
    "first_k_dense_replace": _from("first_k_dense_replace"),
    "num_hash_layers": _from("num_hash_layers"),
    "decoder_sparse_step": _sparse_step,
    "mlp_only_layers": lambda f, r, d: [i for i in range(d) if i not in set(f["mlp_only_layers"])],
}
