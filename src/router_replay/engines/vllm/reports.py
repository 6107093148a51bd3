"""Reads the report of our vLLM plugin, as a server sends it, and what the report says of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from router_replay.engines import checks
from router_replay.engines.http import parsed
from router_replay.engines.vllm.requests import end_of_sequence_ids
from router_replay.errors import EngineError
from router_replay.spec import RouterSpec

NO_CAPTURE = "the server was started without --enable-return-routed-experts"


class PluginReport(msgspec.Struct):
    """Holds the fields of the plugin's report that clients use."""

    captures: bool
    forced_routes: bool
    reason: str
    logprobs_mode: str
    config: str
    generation_config: str
    active: bool = True


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Holds what a client must know of the model that a server runs."""

    spec: RouterSpec
    vocabulary: int | None
    end_of_sequence: tuple[int, ...]


def read_report(report: PluginReport, place: str, spec: RouterSpec | None, vocabulary: int | None) -> ServedModel:
    """Return the model of a report from `place`.

    Raises EngineError if the report cannot be read, or if `spec` or `vocabulary` are given and differ.
    """
    config = _settings(report.config, place)
    try:
        found = RouterSpec.from_config(config)
        tokens = checks.same_vocabulary(vocabulary, checks.vocabulary_of(config))
        stops = end_of_sequence_ids(_settings(report.generation_config, place)) or end_of_sequence_ids(config)
    except Exception as error:  # the server may send anything
        raise EngineError(
            f"the model's config in the answer of {place} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if spec is not None and spec != found:
        raise EngineError(f"the model of {place} has {found}, but spec={spec} was given")
    return ServedModel(found, tokens, stops)


def _settings(text: str, place: str) -> dict[str, Any]:
    """Parse a config in the plugin's report. The json module writes NaN and Infinity, which msgspec cannot read."""
    config = parsed(text, place)
    config = {} if config is None else config  # a model without a generation config
    if not isinstance(config, dict):
        raise EngineError(f"{place}: expected a JSON object as the model's config, got {text[:200]}")
    return config
