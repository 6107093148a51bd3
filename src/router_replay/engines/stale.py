"""Detects server settings that make an engine return rows which do not belong to their tokens.

An engine keeps the row of a token beside the token's KV slot. KV that was not computed in that slot by that worker
(loaded from host memory or disk, sent by another server, split over ranks) has the row of another token there: the
experts are valid, the token is wrong, and there is no error. `check_server` refuses such servers when connecting.

From 0.31 on, vLLM keeps rows by the content of their tokens and not by KV slot. There KV offload returns the right
rows, and vLLM itself refuses the connectors between prefill and decode servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from router_replay.errors import EngineError

Role = Literal["whole", "prefill", "decode"]

_OFFLOAD = "KV that is offloaded and loaded back gets another slot, which still has its old rows"
_EXTERNAL = "KV that comes from outside was not routed by this server, so its slots have the rows of other tokens"
_CONTEXT = "each rank has only the rows of its own part of the sequence"
_PIPELINE = "each stage captures only its own layers, and the rows of the other layers are zero or old"

# Settings of SGLang (`/server_info`) and vLLM (engine arguments, config), by the names that the servers report.
_SWITCHES: dict[str, str] = {
    "enable_hierarchical_cache": _OFFLOAD,
    "hicache_storage_backend": _EXTERNAL,
    "enable_lmcache": _EXTERNAL,
    "enable_flexkv": _EXTERNAL,
    "enable_unified_cache_external_linker": _EXTERNAL,
    "enable_prefill_cp": _CONTEXT,
    "disaggregation_decode_enable_offload_kvcache": _OFFLOAD,
    "kv_offloading_size": _OFFLOAD,
    "kv_offloading_backend": _OFFLOAD,
    "kv_transfer_config": _EXTERNAL,
    "kv_connector": _EXTERNAL,
}
_SIZES: dict[str, str] = {
    "dcp_size": _CONTEXT,
    "attn_cp_size": _CONTEXT,
    "decode_context_parallel_size": _CONTEXT,
    "prefill_context_parallel_size": _CONTEXT,
    "pp_size": _PIPELINE,
    "pipeline_parallel_size": _PIPELINE,
}
# Settings of vLLM that return the right rows from this version on.
_RIGHT_FROM: dict[str, tuple[int, int]] = {
    "kv_offloading_size": (0, 31),
    "kv_offloading_backend": (0, 31),
    "kv_transfer_config": (0, 31),
    "kv_connector": (0, 31),
}
# vLLM reports an offloading backend even if offloading is off, that is, if its size is unset.
_ONLY_WITH = {"kv_offloading_backend": "kv_offloading_size"}


def stale_reasons(info: Mapping[str, Any], role: Role = "whole", version: tuple[int, ...] | None = None) -> list[str]:
    """Return the reasons why this server's rows would be wrong, one line each; empty if they are right.

    `info` holds the settings that the server reports. `role` is the server's part in a prefill/decode pair. `version`
    is the version of a vLLM server, such as (0, 32); None means that it is unknown, or that the server is SGLang.
    """
    settings = {key.replace("-", "_").lstrip("_"): value for key, value in info.items()}
    reasons = []
    for name, why in _SWITCHES.items():
        value = settings.get(name)
        if version is not None and name in _RIGHT_FROM and version >= _RIGHT_FROM[name]:
            continue
        if _is_on(value) and (name not in _ONLY_WITH or _is_on(settings.get(_ONLY_WITH[name]))):
            reasons.append(f"{name}={value!r}: {why}")
    for name, why in _SIZES.items():
        value = settings.get(name)
        if isinstance(value, int) and value > 1:
            reasons.append(f"{name}={value}: {why}")
    mode = settings.get("disaggregation_mode")
    if mode in ("prefill", "decode") and mode != role:
        reasons.append(
            f"disaggregation_mode={mode!r}: {_EXTERNAL}. Connect to the prefill and the decode server separately, "
            "each with its role=, and join their answers with engines.prefill_decode.join_prefill_decode"
        )
    return reasons


def check_server(
    info: Mapping[str, Any],
    role: Role = "whole",
    server: str = "this server",
    *,
    version: tuple[int, ...] | None = None,
) -> None:
    """Raise EngineError if a server's settings make it return stale rows.

    The arguments are those of `stale_reasons`; `server` names the server in the error.
    """
    reasons = stale_reasons(info, role, version)
    if reasons:
        raise EngineError(
            f"{server} would return rows that do not belong to their tokens. Start it without these settings: "
            + "; ".join(reasons)
        )


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):  # vLLM's kv_transfer_config, which may be set without a connector
        return value.get("kv_connector") is not None if "kv_connector" in value else bool(value)
    return value not in (None, False, 0, "", "null", "none", "None")
